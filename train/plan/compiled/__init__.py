"""What a step costs, read from the program that XLA made."""
