"""``python -m megatron_pipemem`` is the ``pipemem`` command; ``torchrun -m megatron_pipemem run ...`` needs it."""

from __future__ import annotations

from megatron_pipemem.cli.app import main

if __name__ == "__main__":
    main()
