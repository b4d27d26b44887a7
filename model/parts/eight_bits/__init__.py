"""Products in eight bits: float8 on NVIDIA GPUs and TPU7x, int8 on TPUs."""
