"""Machines reached by ssh: a supervisor on this machine, processes on others."""
