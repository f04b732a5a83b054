"""State, rows, visibility and the step: what every cache and decoder shares."""
