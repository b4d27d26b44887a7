"""Products of eight bits: float8 on GPUs of NVIDIA, int8 on TPUs."""
