"""Experts: which of them a token goes to, and one product for the rows of each."""
