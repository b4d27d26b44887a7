"""Run `python -m train` on a cluster, and restart it there until it is finished."""
