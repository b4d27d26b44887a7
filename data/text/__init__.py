"""Read documents from files of many formats."""
