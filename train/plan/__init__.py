"""See it before you pay for it: where arrays lie, what a step costs, how fast it is."""
