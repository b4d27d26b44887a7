"""The command line: from arguments to one checked config, without JAX."""
