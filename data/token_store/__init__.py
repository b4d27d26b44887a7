"""Build token stores from parts, verify stores, and read tokens at random."""
