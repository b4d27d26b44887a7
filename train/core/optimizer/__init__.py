"""The update of an optimizer, and the state that it carries."""
