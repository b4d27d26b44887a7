"""The run directory: its checkpoints, logs and records, and who owns it."""
