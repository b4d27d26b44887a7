"""Where the time of steps went: the command, and how a trace is read."""
