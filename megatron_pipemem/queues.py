"""The settings with which every step on a GPU runs by the order for one hardware queue per rank.

In this order a message has one place for both ends, so it ends even if every host waits for its device after every
launch. It takes longer than the usual order, which computes while messages travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ORDERED_STARTS_SUFFICE = False
"""Whether launches that share a hardware queue only have to start in order, as Megatron assumes of one connection. Then the
usual order of most families runs with one connection, too. No GPU has shown it yet: the rows "usual order" of
``benchmarks/gpu/four_ranks.py`` do that with this value set."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_VARIABLES = {
    CONNECTIONS: "puts all launches of a rank into one queue",
    "CUDA_LAUNCH_BLOCKING": "makes hosts wait for their devices at every launch",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "puts all messages of a rank into one order",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "makes hosts wait for their devices whenever they free memory",
}
"""The effects of environment variables with the value 1. Megatron demands the first with tensor or context parallelism before
Blackwell."""
_SANITIZER = "NV_SANITIZER_INJECTION"
"""The beginning of the names of compute-sanitizer's variables."""
_TIMERS = "timing-log-level"
TIMED_PASSES = 2
"""The level of Megatron's timers that time every F, I and B. Timers of level 1 begin and end between steps."""


def why_one_queue(
    environment: Mapping[str, str], times_passes: bool, ordered_starts_suffice: bool = False
) -> str | None:
    """Return the first setting that needs the order for one hardware queue, as a clause; ``None`` if there is none.

    One connection does not need it if ``ordered_starts_suffice``.
    """
    for name, effect in _VARIABLES.items():
        if environment.get(name) == "1" and not (name == CONNECTIONS and ordered_starts_suffice):
            return f"{name}=1 {effect}"
    if any(name.startswith(_SANITIZER) for name in environment):
        return "compute-sanitizer makes hosts wait for their devices at every launch"
    if times_passes:
        waits = f"--{_TIMERS} {TIMED_PASSES} makes hosts wait for their devices around every pass"
        return f"{waits}; pass --{_TIMERS} 1 to measure speed"
    return None


def starts_in_order(environment: Mapping[str, str]) -> bool:
    """Return whether all launches of a rank share one hardware queue."""
    return environment.get(CONNECTIONS) == "1"


def one_queue_of(flags: Mapping[str, Any]) -> str | None:
    """Return a sentence about the order of our schedules on GPUs, if one of Megatron's flags changes it."""
    reason = why_one_queue({}, str(flags.get(_TIMERS)) == str(TIMED_PASSES))
    return (
        None
        if reason is None
        else f"on GPUs, schedules of this package run by the order for one hardware queue: {reason}"
    )
