"""Run the ``pipemem`` command by ``python -m megatron_pipemem``, as ``torchrun -m megatron_pipemem run ...`` does."""

from __future__ import annotations

from megatron_pipemem.tools.cli.app import main

if __name__ == "__main__":
    main()
