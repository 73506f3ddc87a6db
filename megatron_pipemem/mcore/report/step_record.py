"""Write down a pipeline's last step for ``pipemem explain``: when every action ran, what it holds, what the run refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from megatron.core.utils import unwrap_model

from megatron_pipemem.choose.knowledge import Choice
from megatron_pipemem.config.refusals import OVERLAPPED, REORDERED, SCHEDULES, VOCABULARY
from megatron_pipemem.errors import PipememError
from megatron_pipemem.mcore.refusals import check_config, check_model, check_sharing
from megatron_pipemem.runtime.trace import TracedAction
from megatron_pipemem.schedule.action import COMPUTE, Kind
from megatron_pipemem.schedule.placement import Placement

_TYPICAL = 2
"""The first step opens channels, and the second one begins when it has: the time between them is not typical."""


def count_layers(chunks: Sequence[torch.nn.Module], stages: Sequence[int]) -> dict[int, int]:
    """Return the transformer layers of every stage of this rank; nothing of a stage whose model does not say, or whose layers
    a pattern shares out.

    Args:
        chunks: of this rank.
        stages: their numbers.
    """
    found = {}
    for stage, chunk in zip(stages, chunks, strict=True):
        model = unwrap_model(chunk)
        layers = getattr(getattr(model, "decoder", None), "layers", None)
        if layers is not None and not hasattr(model, "hybrid_layer_pattern"):
            found[stage] = len(layers)
    return found


def refused(config, num_devices: int) -> dict[str, str]:
    """Return what a run cannot do by its configuration, and why, under the names that ``pipemem explain`` asks for.

    Args:
        config: Megatron's configuration of the model.
        num_devices: pipeline ranks.
    """
    v = Placement.v_shape(num_devices)
    checks: Mapping[str, Callable[[], None]] = {
        "schedules": lambda: check_config(config, SCHEDULES),
        "reordered": lambda: check_config(config, REORDERED),
        "v": lambda: check_sharing(config, v.name, v),
        "split": lambda: check_model(config, splits=True, recomputes=False),
        "vocabulary": lambda: check_config(config, VOCABULARY),
        "overlap": lambda: check_config(config, OVERLAPPED),
    }
    found = {}
    for name, check in checks.items():
        try:
            check()
        except PipememError as error:
            found[name] = str(error)
    return found


def iteration_seconds(begun: Sequence[float]) -> float | None:
    """Return the median time from the beginning of a training step to that of the next one; ``None`` for a single step.

    Args:
        begun: when the steps of this rank began, in seconds.
    """
    apart = [after - before for before, after in zip(begun, begun[1:], strict=False)]
    return median(apart[_TYPICAL - 1 :] or apart) if apart else None


def last_step(
    pipeline: Sequence[Sequence[TracedAction]],
    plan: Choice,
    layers: Mapping[int, int],
    memory: Mapping[Kind, Sequence[int]],
    more: Mapping[str, object],
) -> dict | None:
    """Return the last step as the report has it, with times in whole nanoseconds since it began; ``None`` where not every
    action was timed.

    Args:
        pipeline: per device, its actions with their times.
        plan: that the step followed.
        layers: of the stages that say how many.
        memory: by how many bytes every kind of action changes what its device holds, per stage.
        more: what else the report says of the step.
    """
    schedule = plan.schedule
    compute = [[action for action in order if action.kind in COMPUTE] for order in schedule.orders]
    if schedule.updates is not None or [[traced.action for traced in actions] for actions in pipeline] != compute:
        return None
    stages = range(schedule.placement.num_stages)
    return {
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "orders": schedule.to_csv(),
        "spans": [" ".join(f"{_ns(each.start)}-{_ns(each.end)}" for each in actions) for actions in pipeline],
        "layers": [layers[stage] for stage in stages] if layers.keys() >= {*stages} else None,
        "memory": {kind.value: list(changes) for kind, changes in memory.items() if any(changes)} or None,
        **more,
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
