"""Move activations to the host and back, planned with the schedule (PipeOffload, 2503.01328)."""
