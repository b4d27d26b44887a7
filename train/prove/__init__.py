"""Prove that a run on its mesh is the run of one device: `python -m train.prove`."""

# Code outside this folder imports only these modules of it.
PUBLIC_MODULES = ("kernels",)
