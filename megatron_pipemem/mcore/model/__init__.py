"""Place Megatron's models on stages, run them as stages, and split their backwards."""
