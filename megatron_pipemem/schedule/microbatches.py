"""Weigh the microbatches of a step that are not alike: by how much each takes longer, and holds more, than priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import Kind, Resource, kinds_where
from megatron_pipemem.schedule.brief import changed_fields, shortened
from megatron_pipemem.schedule.prices import listed_objects, number

LAYERS = kinds_where(lambda spec: spec.runs_layers)
"""What runs the layers of a stage. Its seconds go by ``time``; those of all else go by tokens, and so by ``memory``."""
WEIGHED = kinds_where(lambda spec: spec.resource in (Resource.COMPUTE, Resource.COPY, Resource.COLLECTIVE))
"""The kinds whose seconds may have weights of their own."""


@dataclass(frozen=True)
class MicrobatchWeights:
    """Say by how much the actions of every microbatch take longer, and hold more, than those that ``Costs`` prices.

    1.0 is as priced. A ``Schedule`` numbers microbatches by position, and these weights stand in that order.

    Args:
        time: per microbatch, of the seconds of its layers' actions: F, I, W, B, R and RS.
        memory: per microbatch, of what it holds, in device and host memory; and, since they go by tokens too, of the
            seconds of its messages, of its transfers to the host, and of the passes and collectives of vocabulary
            parallelism. ``None``: 1 each.
        kinds: weights of the seconds of single kinds, in place of those above: attention's F grows with the square of the
            document, its W does not. R takes those of F if it has none of its own, and B costs its I and its W.

    Raises:
        CostsError: a weight is no finite number of at least 0, the lengths differ, or a kind has no seconds to weigh.
    """

    time: tuple[float, ...]
    memory: tuple[float, ...] | None = None
    kinds: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _weights("time", self.time))
        if self.memory is not None:
            object.__setattr__(self, "memory", _weights("memory", self.memory))
        if strange := sorted(set(self.kinds) - WEIGHED):
            raise CostsError(
                "unknown-key",
                f"microbatch.kinds has {shortened(strange[0])}; give some of {', '.join(sorted(WEIGHED))}",
            )
        kinds = {Kind(kind): _weights(f"kinds.{kind}", weights) for kind, weights in self.kinds.items()}
        object.__setattr__(self, "kinds", kinds)
        named = {"memory": self.memory or self.time, **{f"kinds.{kind}": weights for kind, weights in kinds.items()}}
        for name, weights in named.items():
            if len(weights) != len(self.time):
                raise CostsError(
                    "wrong-count",
                    f"microbatch.{name} has {len(weights)} weights and microbatch.time has {len(self.time)}; give one of "
                    "each per microbatch",
                )

    def __len__(self) -> int:
        return len(self.time)

    def check(self, num_microbatches: int) -> None:
        """Raise a CostsError if these are not the weights of so many microbatches."""
        if len(self) != num_microbatches:
            raise CostsError(
                "wrong-count",
                f"there are weights of {len(self)} microbatches for a step of {num_microbatches}; give one per microbatch",
            )

    def seconds_of(self, kind: Kind) -> tuple[float, ...]:
        """Return the weights of a kind's seconds; B has its own only where ``kinds`` says so."""
        if kind is Kind.R and kind not in self.kinds:
            kind = Kind.F
        return self.kinds.get(kind) or (self.time if kind in LAYERS else self.tokens)

    @property
    def tokens(self) -> tuple[float, ...]:
        """Return the weights of all that goes by tokens: ``memory``."""
        return (1.0,) * len(self) if self.memory is None else self.memory

    def reordered(self, order: Sequence[int]) -> MicrobatchWeights:
        """Return the weights by position if position ``i`` runs the microbatch ``order[i]`` of these.

        Raises:
            CostsError: it is no permutation of them.
        """
        if sorted(order) != list(range(len(self))):
            raise CostsError(
                "wrong-order",
                f"order {shortened(list(order))} does not name every one of {len(self)} microbatches once",
            )

        def moved(weights: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(weights[each] for each in order)

        return replace(
            self,
            time=moved(self.time),
            memory=None if self.memory is None else moved(self.memory),
            kinds={kind: moved(weights) for kind, weights in self.kinds.items()},
        )


def _weights(name: str, given: object) -> tuple[float, ...]:
    listed = listed_objects(given)
    if listed is None:
        raise CostsError(
            "bad-type", f"microbatch.{name} is {shortened(given)}; give a list of one weight per microbatch"
        )
    weights = tuple(number(f"microbatch.{name}[{at}]", each) for at, each in enumerate(listed))
    if (least := min(weights)) < 0:
        raise CostsError("bad-number", f"microbatch.{name}[{weights.index(least)}] is negative: {least}")
    return weights
