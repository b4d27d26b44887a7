"""Text from a model: `python -m train.sample`, and the samples of a finished run."""
