"""Turn a config into a program: choose every `auto`, and find every mistake."""
