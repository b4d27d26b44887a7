"""Optional parts of the model, a room for each."""
