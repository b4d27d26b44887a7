"""The GPT as mathematics; knows nothing of meshes, files, data or training."""
