"""Rates and devices of chips and networks, also of machines that are not present."""
