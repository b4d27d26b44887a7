"""Mixture of experts: router, exchange between devices and grouped products."""
