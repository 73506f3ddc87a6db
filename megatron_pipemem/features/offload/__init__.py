"""Copy activations to the host and back, at times planned with the schedule (PipeOffload, arXiv 2503.01328)."""
