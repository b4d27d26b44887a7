"""Score a model: loss on held-out text, tasks, and the results of a finished run."""
