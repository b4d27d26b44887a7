"""Whether activations and their changes keep their size when a model grows."""
