"""Attention over rows that devices share."""
