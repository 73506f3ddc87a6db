"""Update weights within a step, and keep several versions of the weights (PipeDream, PipeDream-2BW)."""
