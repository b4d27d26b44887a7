"""Show how the time of a training step is spent, from a profiler trace."""
