"""Slurm: one job that puts itself back into the queue."""
