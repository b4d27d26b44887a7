"""Run the command line of training on a cluster, and keep it running there."""
