"""Token stores: written in parts, checked, and read at random."""
