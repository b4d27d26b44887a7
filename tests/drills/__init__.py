"""Fault drills: `python -m tests.drills`."""
