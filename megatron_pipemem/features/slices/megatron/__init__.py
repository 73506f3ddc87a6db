"""Run the slices of a sequence one after the other through Megatron's models."""
