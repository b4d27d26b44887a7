"""Plan a training step without running it: array layout, memory, cost and speed."""

# Code outside this folder imports only these modules of it.
PUBLIC_MODULES = (
    "budget",
    "compiled",
    "plan",
    "search",
)
