"""The rates of chips and networks, also of machines that one does not have."""
