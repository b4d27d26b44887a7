"""Slurm: one job that requeues itself."""
