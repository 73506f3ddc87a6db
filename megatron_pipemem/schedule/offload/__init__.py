"""Activations that spend the time between forward and backward in host memory, planned with the schedule.

``megatron_pipemem.schedule.offload.search`` chooses the order as well.
"""

from megatron_pipemem.schedule.offload.planner import OffloadPlan, plan_offload
from megatron_pipemem.schedule.offload.recompute import with_recompute

__all__ = ["OffloadPlan", "plan_offload", "with_recompute"]
