"""The gated delta net: a mixer whose state has a fixed size."""
