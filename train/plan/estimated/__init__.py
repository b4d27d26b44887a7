"""Estimate the cost of a step from shapes and shardings, without a compiler."""
