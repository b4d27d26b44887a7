"""The libraries of trackers, each wrapped in a `Writer`."""
