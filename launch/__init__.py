"""Takes the command line of training to a cluster, and keeps it running there."""
