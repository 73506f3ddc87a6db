"""The settings with which every step on a GPU runs by the order for one hardware queue per rank.

In this order a message has one place for both ends, so it ends even if every host waits for its device after every
launch. It takes longer than the usual order, which computes while messages travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "puts all launches of a rank into one queue",
    "CUDA_LAUNCH_BLOCKING": "makes hosts wait for their devices at every launch",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "puts all messages of a rank into one order",
}
"""The effects of environment variables with the value 1. Megatron demands the first with tensor or context parallelism before
Blackwell."""
_SANITIZER = "NV_SANITIZER_INJECTION"
"""The beginning of the names of compute-sanitizer's variables."""
_TIMERS = "timing-log-level"
TIMED_PASSES = 2
"""The level of Megatron's timers that time every F, I and B. Timers of level 1 begin and end between steps."""


def why_one_queue(environment: Mapping[str, str], times_passes: bool) -> str | None:
    """Return the first setting that needs the order for one hardware queue, as a clause; ``None`` if there is none."""
    for name, effect in _VARIABLES.items():
        if environment.get(name) == "1":
            return f"{name}=1 {effect}"
    if any(name.startswith(_SANITIZER) for name in environment):
        return "compute-sanitizer makes hosts wait for their devices at every launch"
    if times_passes:
        waits = f"--{_TIMERS} {TIMED_PASSES} makes hosts wait for their devices around every pass"
        return f"{waits}; pass --{_TIMERS} 1 to measure speed"
    return None


def one_queue_of(flags: Mapping[str, Any]) -> str | None:
    """Return a sentence about the order of our schedules on GPUs, if one of Megatron's flags changes it."""
    reason = why_one_queue({}, str(flags.get(_TIMERS)) == str(TIMED_PASSES))
    return (
        None
        if reason is None
        else f"on GPUs, schedules of this package run by the order for one hardware queue: {reason}"
    )
