"""Which layout of a step is the fastest that fits."""
