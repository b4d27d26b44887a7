"""Causal attention within documents: one function with a kernel per platform."""
