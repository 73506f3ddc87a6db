"""Decide which steps run by the order for one hardware queue per rank.

In such an order a message stands at one place for both ends, so it ends even if every host waits for its device after every
launch. Hosts do so on a GPU when something is launched for the first time: CUDA loads a kernel then, and loading waits for all
that runs, posted messages included. Later launches do not wait, and the usual order hides messages behind computing.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

import torch

from megatron_pipemem.choose.knowledge import Shape

FIRST_STEPS = 2
"""The second one adds to gradients that are there, which takes other kernels."""

_ONE_QUEUE = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "NCCL_LAUNCH_ORDER_IMPLICIT")
"""With the value 1 they put all launches of a rank, or all of its messages, into one order. Megatron asks for one connection
with tensor or context parallelism before Blackwell."""
_SANITIZER = "NV_SANITIZER_INJECTION"
"""The start of the variables that compute-sanitizer sets in the process that it watches. Its hosts wait for every kernel."""


def has_single_queue(device: torch.device) -> bool:
    """Return whether every step on this device needs the order for one hardware queue.

    Args:
        device: where the model is.
    """
    if device.type != "cuda":
        return False
    return any(os.environ.get(name) == "1" for name in _ONE_QUEUE) or any(n.startswith(_SANITIZER) for n in os.environ)


def waits_at_first_launch(device: torch.device) -> bool:
    """Return whether a host may wait for this device when it launches something for the first time."""
    return device.type == "cuda"


class LaunchKind(NamedTuple):
    """Tell apart steps that launch other kernels.

    Args:
        forward_only: whether the step evaluates.
        logits: whether it is asked for something else than losses.
        shape: of the step.
        message: shape of the messages; ``None`` if it differs between microbatches.
        renewals: how often training has been planned anew before the step.
    """

    forward_only: bool
    logits: bool
    shape: Shape
    message: tuple[int, ...] | None
    renewals: int


class LaunchOrders:
    """Know which steps launch something new.

    Args:
        forced: whether all steps run by the order for one hardware queue, on every device.
    """

    def __init__(self, forced: bool = False) -> None:
        self._forced = forced
        self._seen: Counter[LaunchKind] = Counter()

    def queues(self, device: torch.device) -> tuple[bool, ...]:
        """Return the orders that a run on this device needs, each as whether it is for one hardware queue. The usual one comes
        first.
        """
        if self._forced or has_single_queue(device):
            return (True,)
        return (False, True) if waits_at_first_launch(device) else (False,)

    def of(self, queues: tuple[bool, ...], kind: LaunchKind) -> bool:
        """Return whether a step runs by the order for one hardware queue, alike on all ranks of its pipeline.

        Args:
            queues: the orders that its programs have.
            kind: of the step.
        """
        if len(queues) == 1:
            return queues[0]
        # Where lengths differ, every step may bring a new one, and with it new kernels.
        return kind.message is None or self._seen[kind] < FIRST_STEPS

    def ended(self, kind: LaunchKind) -> None:
        """Take note of a step that has run."""
        self._seen[kind] += 1
