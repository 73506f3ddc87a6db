"""Program of a rank: one case of a program that builds and trains models of Megatron-Core by itself."""

from __future__ import annotations

from importlib import import_module

import bridge_loop_program
import call_shapes
import mbridge_program
import megatron_bridge_program
import vision_program
from loops import session
from megatron.core import parallel_state

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


def run(case: dict) -> dict:
    """What the program returns, or the error that says what cannot be."""
    program = PROGRAMS[case["program"]]
    try:
        if case["program"] != "bridge-loop":
            with session(case["schedule"], case.get("settings"), case["chunks"]):
                return program(case)
        try:  # enables a schedule and makes groups by itself, as a recipe says
            return program(case)
        finally:
            megatron_pipemem.disable()
            parallel_state.destroy_model_parallel()
    except UnsupportedError as error:
        return {"failure": str(error), "code": error.code}
