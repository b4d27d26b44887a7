"""Estimates the cost of a step from shapes alone."""
