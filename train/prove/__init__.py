"""Prove that a run on its mesh is the run of one device: `python -m train.prove`."""
