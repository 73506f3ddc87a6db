"""Train a GPT with Megatron-Core's own training loop and Megatron's flags.

Start it with ``pipemem run`` to choose a pipeline schedule, or with torchrun to train on stock Megatron.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Not at the top of the file: for its first checkpoint, every rank starts a process that imports this file again.
    from gpt_pretraining import main

    main()
