"""From a config to a program: every `auto` is chosen and every mistake found here."""
