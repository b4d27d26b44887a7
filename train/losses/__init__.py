"""The loss of a token: which one training minimizes, and how to write another."""
