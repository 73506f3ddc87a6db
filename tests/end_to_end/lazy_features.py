"""Steps of ranks that can import no feature of the package, and of ranks with a feature that a user registers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import plain_loop

from megatron_pipemem import Family, KindSpec, Need, Schedule, register_kind, register_schedule
from megatron_pipemem.features import FeatureSpec, register_feature

CASE = {"schedule": "v-half", "chunks": 2, "ddp": True, "import_after": False}


class NoFeatures:
    """An import hook under which the folders of features are not there."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.startswith("megatron_pipemem.features."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run(case: dict) -> dict:
    """Return the modules of the package that a step of ``case["kind"]`` loads, and its losses.

    ``plain`` runs without any folder of a feature; ``registered`` runs a kind of action whose handler a registered feature has.
    """
    if case["kind"] == "plain":
        sys.meta_path.insert(0, NoFeatures())
        losses = plain_loop.run(CASE)["losses"]
        return {
            "modules": sorted(name for name in sys.modules if name.startswith("megatron_pipemem")),
            "losses": losses,
        }
    counted: list[str] = []
    _register(counted)
    return {"counted": counted, "losses": plain_loop.run({**CASE, "schedule": "counted-v-half"})["losses"]}


def _register(counted: list[str]) -> None:
    """Register a kind, a family that has it after every forward, and the feature that runs it."""
    from megatron_pipemem.mcore.step.extension import Extension, Step
    from megatron_pipemem.runtime.executor import Executor, Handlers, StepFeature
    from megatron_pipemem.schedule.registry import build_schedule

    kind = register_kind(KindSpec("COUNT", "count", (90, 200, 200), needs=(Need("F"),), prepares=("I", "B")))

    def build(num_devices: int, num_microbatches: int) -> Schedule:
        plain = build_schedule("v-half", num_devices=num_devices, num_microbatches=num_microbatches)
        orders = (
            [b for a in order for b in ([a, a._replace(kind=kind)] if a.kind.value == "F" else [a])]
            for order in plain.orders
        )
        return replace(plain, name="counted-v-half", orders=tuple(map(tuple, orders)))

    class Counts(Extension):
        def extend_executor(self, step: Step) -> Sequence[StepFeature]:
            return [self]

        def extend(self, executor: Executor) -> Handlers:
            return {kind: lambda instruction: counted.append(str(instruction.action))}

    register_schedule(Family("counted-v-half", build, "v-half, and a count after every forward"))
    register_feature(
        FeatureSpec("counts", lambda request: "counted" in request.schedule, extensions=lambda *_: [Counts()])
    )
