"""Search for the fastest layout of a step that fits."""
