"""Plan a training step without running it: array layout, memory, cost and speed."""
