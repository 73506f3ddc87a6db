"""Say what runs where and in which order. Pure Python: imports neither torch nor megatron."""
