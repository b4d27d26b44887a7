"""Find, connect, stop and watch the processes of a run."""

# Code outside this folder imports only these modules of it.
PUBLIC_MODULES = (
    "joining",
    "messages",
    "peers",
    "preemption",
    "processes",
    "watchdog",
)
