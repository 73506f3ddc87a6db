"""Drop all or the cheap activations of a stage after its forward, and compute them again before its backward."""
