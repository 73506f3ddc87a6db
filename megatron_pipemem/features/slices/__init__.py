"""Cut each microbatch into slices of its sequences, which run one after the other."""
