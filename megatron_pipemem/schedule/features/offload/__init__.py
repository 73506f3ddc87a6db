"""Plan with the schedule which activations spend the time between forward and backward in host memory."""

from megatron_pipemem.schedule.features.offload.plan import OffloadPlan
from megatron_pipemem.schedule.features.offload.planning import plan_offload
from megatron_pipemem.schedule.features.offload.recompute import (
    in_words,
    recompute_plans,
    recomputed_by_mode,
    with_early_recompute,
    with_recompute,
)

__all__ = [
    "OffloadPlan",
    "in_words",
    "plan_offload",
    "recompute_plans",
    "recomputed_by_mode",
    "with_early_recompute",
    "with_recompute",
]
