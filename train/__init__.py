"""Put model and data on a mesh and train."""
