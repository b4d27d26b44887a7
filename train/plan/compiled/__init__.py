"""The cost of a step, read from the program that XLA compiled."""
