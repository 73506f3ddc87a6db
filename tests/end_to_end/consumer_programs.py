"""Program of a rank: one case of a program that builds and trains models of Megatron-Core by itself."""

from __future__ import annotations

from importlib import import_module

import bridge_loop_program
import call_shapes
import mbridge_program
import megatron_bridge_program
import torch.distributed as dist
import vision_program
from megatron.core import parallel_state, tensor_parallel

import megatron_pipemem
from megatron_pipemem.errors import UnsupportedError

PROGRAMS = {
    "mbridge": mbridge_program.train,
    "megatron-bridge": megatron_bridge_program.train,
    "bridge-loop": bridge_loop_program.train,
    "vision": vision_program.train,
    "verl-worker": lambda case: import_module("verl_program").train(case),  # which not all ranks have
    **dict.fromkeys(call_shapes.SHAPES, call_shapes.train),
}


def _start(case: dict) -> None:
    if case["schedule"] != "stock":
        megatron_pipemem.enable(case["schedule"], **case.get("settings", {}))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=dist.get_world_size(), virtual_pipeline_model_parallel_size=case["chunks"]
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def run(case: dict) -> dict:
    """What the program returns, or what it was told that cannot be."""
    if case["program"] != "bridge-loop":  # which does the same by itself, as a recipe says
        _start(case)
    try:
        return PROGRAMS[case["program"]](case)
    except UnsupportedError as error:
        return {"told": str(error), "code": error.code}
    finally:
        megatron_pipemem.disable()
        parallel_state.destroy_model_parallel()
