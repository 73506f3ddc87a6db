"""Update weights within a step, with several versions of them (PipeDream, PipeDream-2BW)."""
