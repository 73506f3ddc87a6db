"""Report what a run measured, next to what its plan predicted."""
