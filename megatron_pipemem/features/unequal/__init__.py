"""Reorder the microbatches of a step whose costs differ, so that the step gets shorter."""
