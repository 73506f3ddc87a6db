"""Schedules: the actions of every device, in order. Pure Python: imports neither torch nor megatron."""
