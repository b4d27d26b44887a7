"""Attention with compressed keys and values."""
