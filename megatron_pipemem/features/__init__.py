"""The features of runs on Megatron: one row of ``FEATURES`` for each feature that takes part in training steps.

Each feature has a folder here. It is imported only if the user's request needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import LAYERWISE

if TYPE_CHECKING:
    from megatron_pipemem.request import Request


class Position(Enum):
    """The place of a feature's extensions in the order in which a step calls all extensions."""

    PLANNING = auto()
    """before the kernel's handlers of actions: a feature here may choose the program of a step"""
    STAGES = auto()
    """when the shapes of messages are known: a feature here replaces stages, or adds handlers of actions"""
    LAST = auto()
    """after all other features, whose handlers it may wrap; the only position in runs of Megatron's own schedule"""


@dataclass(frozen=True)
class FeatureSpec:
    """A feature of runs on Megatron.

    Example: run the actions of a kind of your own.

        def extensions(request, programs, chunk_placement):
            return [ChecksumSteps()]  # an Extension whose extend_executor returns the StepFeature with the handler

        register_feature(FeatureSpec("checksums", is_needed=lambda request: True, extensions=extensions))

    Args:
        name: unique among all features.
        is_needed: whether a run with this request has the feature. Called before anything of the feature is imported.
        position: the place of its extensions among all extensions of a step.
        extensions: the function that returns the extensions, called with the request, the ``ProgramStore`` and the
            ``ChunkPlacement`` of a run (Megatron's own schedule has only the request), or ``package.module:function``.
            By default ``extensions`` in the module ``megatron`` of the feature's folder.
    """

    name: str
    is_needed: Callable[[Request], bool]
    position: Position = Position.STAGES
    extensions: Callable[..., list[Any]] | str = ""

    def load(self) -> Callable[..., list[Any]]:
        """Import the feature, and return the function that makes its extensions."""
        if callable(self.extensions):
            return self.extensions
        module, _, function = (self.extensions or f"{__name__}.{self.name}.megatron:extensions").partition(":")
        return getattr(import_module(module), function)


FEATURES = (
    FeatureSpec("offload", lambda request: request.may_offload, Position.PLANNING),
    FeatureSpec("unequal", lambda request: request.microbatch_costs is not None, Position.PLANNING),
    FeatureSpec("asynchronous", lambda request: request.is_asynchronous, Position.PLANNING),
    FeatureSpec(
        "overlap_steps", lambda request: request.overlap_steps and not request.is_asynchronous, Position.PLANNING
    ),
    FeatureSpec("replicas", lambda request: request.replicas > 1),
    FeatureSpec("slices", lambda request: request.may_cut),
    FeatureSpec("graphs", lambda request: request.graphs),
    FeatureSpec("pairs", lambda request: request.pairs),
    FeatureSpec("vocabulary", lambda request: request.cuts_vocabulary),
    FeatureSpec("layerwise", lambda request: request.rng == LAYERWISE, Position.LAST),
)
"""All features of this package, in the order in which a step calls their extensions."""

_REGISTERED: list[FeatureSpec] = []


def register_feature(feature: FeatureSpec) -> None:
    """Add a feature to all runs that are enabled after this call.

    Raises:
        UnsupportedError: another feature has the same name.
    """
    if feature.name in (registered.name for registered in (*FEATURES, *_REGISTERED)):
        raise UnsupportedError(
            "exists-already", f"feature {shortened(feature.name)} is registered already; pick another name"
        )
    _REGISTERED.append(feature)


def features_at(position: Position, request: Request) -> Iterable[FeatureSpec]:
    """Return the features that a request wants and whose extensions have this position in a step.

    Those of ``FEATURES`` come first, in its order, then the registered ones.
    """
    return (
        feature for feature in (*FEATURES, *_REGISTERED) if feature.position is position and feature.is_needed(request)
    )
