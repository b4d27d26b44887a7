"""The cost of a step, read from the program that XLA compiled."""

# Code outside this folder imports only these modules of it.
PUBLIC_MODULES = ("labels",)
