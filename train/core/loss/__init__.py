"""The loss of a language model, for large vocabularies without all logits at once."""
