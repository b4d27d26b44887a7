"""Chips, networks and machines, including machines that are not present."""
