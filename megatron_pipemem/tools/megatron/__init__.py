"""Read the flags of an installed Megatron and the recipes of Megatron-Bridge, and measure the times of layers."""
