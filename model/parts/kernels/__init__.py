"""Attention kernels of TPUs and NVIDIA GPUs."""
