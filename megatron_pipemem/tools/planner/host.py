"""Find out whether a host launches the passes of a step more slowly than its device computes them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.ways import Way


def bound_by_host(way: Way, slowdown: MeasuredSlowdown | None) -> str | None:
    """Return a sentence with the seconds of host and device if a step is bound by the host.

    Return ``None`` if it is not, if the seconds of launches were not measured, or if the run has CUDA graphs.
    """
    if slowdown is None or way.run.has_graphs:
        return None
    host = host_seconds(way, dict(slowdown.launching))
    if host <= way.work_seconds:
        return None
    return (
        f"a host takes {host:.4g} s to launch the passes of a step of {way.name}, and its device at most "
        f"{way.work_seconds:.4g} s to compute them: CUDA graphs first (--cuda-graph-impl local), schedule second"
    )


def host_seconds(way: Way, launching: Mapping[str, float]) -> float:
    """Return the seconds in which the host with the most layers launches the F, I and W of a step's layers.

    ``launching`` has the seconds of F, I and W of one layer, by kind. Embedding, head and other kinds count as 0.
    """
    step, kinds = way.step, way.run.model.kinds
    ends = (0, *accumulate(step.layers))
    of_stages = [sum(launching.get(kind, 0.0) for kind in kinds[begin:end]) for begin, end in pairwise(ends)]
    placement = step.placement
    of_devices = [sum(of_stages[stage % placement.model_stages] for stage in stages) for stages in placement.stages]
    return len(way.run.units) * max(of_devices) / placement.replicas
