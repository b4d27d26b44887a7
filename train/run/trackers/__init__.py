"""The libraries that trackers are written with, each behind a `Writer`."""
