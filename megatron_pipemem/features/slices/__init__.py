"""Cut a microbatch into slices of its sequence."""
