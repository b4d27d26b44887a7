"""Search for the fastest layout of a step that fits."""

# Code outside this folder imports only these modules of it.
PUBLIC_MODULES = ("search",)
