"""The program of a step, and the loop that runs it."""
