"""Turn the arguments of a command into one checked config, without importing JAX."""
