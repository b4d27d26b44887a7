"""Machines reached by ssh: a supervisor here, processes there."""
