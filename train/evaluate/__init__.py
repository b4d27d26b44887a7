"""Judging a model: its loss on held-out text, and what a finished run has to show."""
