"""Order the microbatches of a step by what each costs."""
