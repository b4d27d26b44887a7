"""Reads the costs of a step from the program that XLA compiled."""
