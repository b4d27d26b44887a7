"""Find, connect, stop and watch the processes of a run."""
