"""Sum up the gradients of two replicas of the model on one set of ranks (GEMS, Chimera, DualPipe)."""
