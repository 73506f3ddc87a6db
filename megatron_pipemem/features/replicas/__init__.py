"""Train two replicas of the model on the same ranks, and sum their gradients (GEMS, Chimera, DualPipe)."""
