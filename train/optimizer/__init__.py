"""The optimizer: schedules, AdamW, and Muon at any number of devices."""
