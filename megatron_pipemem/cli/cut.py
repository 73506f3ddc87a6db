"""Define the options of commands that take a model by its name, and say how a microbatch of it runs on one rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import make_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from megatron_pipemem.config.model import Execution
from megatron_pipemem.errors import UnsupportedError

DEFAULT_CLUSTER = "a100-80g"
ClusterName = Annotated[str | None, typer.Option(help="A cluster by name or YAML file.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens per sequence, if not the model's.")]

_TOLD = {
    "tp": "Tensor-parallel ranks.",
    "sequence_parallel": "Split norms over them too.",
    "cp": "Context-parallel ranks.",
    "ep": "Expert-parallel ranks.",
    "micro_batch": "Sequences per microbatch.",
    "recompute": "What runs again before its backward.",
    "attention": "Which attention the layers have.",
    "precision": "Element type of weights and activations.",
}
"""Fields of ``Execution`` that can be typed, in place of a run."""
_HINTS = get_type_hints(Execution)


def cut_options(*names: str) -> type:
    """Return a dataclass of options for these fields of ``Execution``."""
    return make_dataclass("Cut", [_typed_as(name) for name in names], frozen=True, kw_only=True)


def _typed_as(name: str) -> tuple[str, Any, Any]:
    """Return a field of ``Cut`` for one of ``Execution``: text where that has few values, which ``Execution`` checks."""
    hint, values = _HINTS[name], get_args(_HINTS[name])
    flag = typer.Option(f"--{name.replace('_', '-')}", metavar="|".join(values) or None, help=_TOLD[name])
    return name, Annotated[str if values else hint, flag], getattr(Execution, name)


def check_runs_own(context: typer.Context, names: Collection[str]) -> None:
    """Refuse what would change nothing: a run says itself how it is cut and runs.

    Raises:
        UnsupportedError: one of these options was typed.
    """
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name)
        if parameter.name in names and given is not None and given.name == "COMMANDLINE":
            raise UnsupportedError(
                "conflicting-options",
                f"{parameter.opts[0]} is said by the run; change it there, or give a model in place of the run",
            )
