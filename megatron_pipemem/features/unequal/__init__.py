"""Order the microbatches of a step by their costs."""
