"""Causal attention inside documents: one function, a kernel a platform."""
