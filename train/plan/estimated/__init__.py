"""What a step costs, estimated from shapes alone."""
