"""Kubernetes: JobSets on GKE, for TPUs and GPUs."""
