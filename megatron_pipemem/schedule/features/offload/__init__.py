"""Plan with the schedule which activations spend the time between forward and backward in host memory.

``megatron_pipemem.schedule.search.offload`` chooses the order as well.
"""

from megatron_pipemem.schedule.features.offload.plan import OffloadPlan
from megatron_pipemem.schedule.features.offload.planning import plan_offload
from megatron_pipemem.schedule.features.offload.recompute import (
    fastest_within,
    in_words,
    over_cap,
    recompute_plans,
    recomputed_by_mode,
    with_early_recompute,
    with_recompute,
)

__all__ = [
    "OffloadPlan",
    "fastest_within",
    "in_words",
    "over_cap",
    "plan_offload",
    "recompute_plans",
    "recomputed_by_mode",
    "with_early_recompute",
    "with_recompute",
]
