"""The run directory: what is in it, who owns it, and what survives."""
