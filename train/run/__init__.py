"""The run directory: its checkpoints, logs and records, and who owns it."""

# Code outside this folder imports only these modules of it.
PUBLIC_MODULES = (
    "branch",
    "checkpoint",
    "comparison",
    "digests",
    "directory",
    "evaluations",
    "folder",
    "goodput",
    "lease",
    "metrics",
    "profiles",
    "report",
    "restore",
    "starts",
    "this_start",
    "validations",
    "versions",
)
