"""A training program of which one rank is refused: ``python refused_rank.py PLACE RANK`` is one of its ranks.

At the place ``still`` the rank stands still instead.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

import megatron_pipemem
from megatron_pipemem.errors import with_code
from megatron_pipemem.mcore.launch import enable_from_command_line

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import training_loop

PLACE, RANK = sys.argv[1], int(os.environ["RANK"])
IS_REFUSED = int(sys.argv[2]) == RANK

sys.excepthook = lambda kind, error, trace: print(with_code(error), file=sys.stderr)
SIZES = "--num-layers 8 --pipeline-model-parallel-size 2".split()


def batches_that_end(step: int):
    """Yield too few microbatches for the second step."""
    return itertools.islice(batches(step), 1 if step == 1 else None)


def blocked_forward_step(data, model):
    """Block in the second step, like a host whose device waits for another rank."""
    calls.append(None)
    if len(calls) == 2 * training_loop.MICROBATCHES + 4:
        print("blocked", flush=True)
        time.sleep(36000)
    return forward_step(data, model)


if PLACE == "flags":
    enable_from_command_line([*SIZES, "--pipemem-schedule", "v-hlaf" if IS_REFUSED else "v-half"])
dist.init_process_group("gloo")
if PLACE == "settings":
    megatron_pipemem.enable("v-hlaf" if IS_REFUSED else "v-half")
batches, forward_step, calls = training_loop.batches, training_loop.forward_step, []
if PLACE == "still":
    training_loop.forward_step = blocked_forward_step if IS_REFUSED else forward_step
elif IS_REFUSED:
    training_loop.batches = batches_that_end
elif PLACE == "kernel":
    training_loop.forward_step = blocked_forward_step
if PLACE == "vocabulary":  # tensor-parallel ranks are not side by side
    megatron_pipemem.enable("v-half", vocab_cut="1")
    initialize = parallel_state.initialize_model_parallel
    parallel_state.initialize_model_parallel = lambda **sizes: initialize(
        **sizes | {"pipeline_model_parallel_size": 2}, tensor_model_parallel_size=2, order="pp-tp-cp-ep-dp"
    )
    megatron_pipemem.enable = lambda schedule: None
training_loop.train(steps=3)
