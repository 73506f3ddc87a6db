"""The only package, beside ``cpu/``, that imports megatron: it attaches schedules to stock Megatron-Core."""
