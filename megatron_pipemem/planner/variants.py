"""List what a run can do beside computing in another order: offload, vocabulary parallelism, and what others register.

A variant changes what the stages cost, or adds actions to an order, or both, and says what the run's configuration then is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron_pipemem.config.runs import Run, ScheduleChoice
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.planner.offload import offload_step, offloaded
from megatron_pipemem.planner.prices import MeasuredSlowdown
from megatron_pipemem.planner.step import Step
from megatron_pipemem.planner.vocabulary import vocabulary_cut, vocabulary_step
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.vocabulary import BARRIERS_OF_ALGORITHM


@dataclass(frozen=True)
class Variant:
    """One way.

    Args:
        name: what ``--only variant=NAME`` and tables call it.
        choice: the schedule's part of a run's configuration, from that without the variant.
        prepare: the step with other costs and bytes, from placement and pace. Its costs must be a lower bound for
            what ``apply`` makes of an order, so that the planner may leave out what is slower even so.
        apply: the order with further actions, within so many bytes per device. May raise PipememError where it cannot be
            had.
        frees_memory: it is for orders that hold too much, and no use to others. Without it, it holds no less than the order
            alone. Either way it takes no less time than that.
    """

    name: str
    choice: Callable[[ScheduleChoice], ScheduleChoice]
    prepare: Callable[[Run, Placement, MeasuredSlowdown | None], Step]
    apply: Callable[[Schedule, Step, tuple[float, ...]], Schedule]
    frees_memory: bool = False


PLAIN = "plain"
"""The name of a run without any variant."""
_VARIANTS: dict[str, Variant] = {}


def register_variant(variant: Variant) -> Variant:
    """Add a variant to what the planner enumerates.

    Raises:
        UnsupportedError: there is one of that name.
    """
    if variant.name in _VARIANTS or variant.name == PLAIN:
        raise UnsupportedError(f"variant {variant.name!r} is registered already; pick another name")
    _VARIANTS[variant.name] = variant
    return variant


def variants() -> tuple[Variant, ...]:
    """Return all variants but the plain one: those of this package, and what others registered."""
    return tuple(_VARIANTS.values())


register_variant(
    Variant(
        "offload",
        choice=lambda choice: replace(choice, offload="auto"),
        prepare=offload_step,
        apply=offloaded,
        frees_memory=True,
    )
)
for _algorithm, _barriers in BARRIERS_OF_ALGORITHM.items():
    register_variant(
        Variant(
            f"vocabulary-{_algorithm}",
            choice=partial(replace, vocab_parallel=str(_algorithm)),
            prepare=partial(vocabulary_step, _barriers),
            apply=partial(vocabulary_cut, _barriers),
        )
    )
