"""Update weights while microbatches are in flight, and keep versions of the weights (PipeDream, PipeDream-2BW)."""
