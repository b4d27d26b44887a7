"""The loss of a token that training minimizes, and the means to write another one."""
