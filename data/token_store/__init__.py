"""Tokens at rest: written in parts, checked, read at random."""
