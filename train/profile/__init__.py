"""The command that shows what the time of a step goes to, and its trace reader."""
