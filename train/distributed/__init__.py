"""Many processes: found, joined, stopped, watched."""
