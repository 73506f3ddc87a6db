"""The command line: ``pipemem``, or ``python -m megatron_pipemem``."""
