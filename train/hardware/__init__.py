"""What chips and networks can do, also of machines one does not have."""
