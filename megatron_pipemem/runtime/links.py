"""Measure how long a message between neighbouring pipeline ranks takes."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from megatron_pipemem.runtime.transport import Edge, MessageFormat, Pipeline, edges

_ROUND_TRIPS = 5


def measure_links(pipeline: Pipeline, message: MessageFormat) -> dict[Edge, float]:
    """Return the seconds of a message in either direction: half a round trip while nothing else runs in this pipeline.

    Every rank of the pipeline must call this at the same time, between steps.

    Args:
        pipeline: from ``connect``.
        message: format of the messages; of one shape.

    Returns:
        The links that this rank has timed: those to higher devices.
    """
    assert message.shape is not None, "messages of changing shape have no one cost"
    payload = torch.zeros(message.shape, dtype=message.dtype, device=message.device)
    seconds: dict[Edge, float] = {}
    device, ranks, groups = pipeline.device, pipeline.ranks, pipeline.channels
    for low, high in edges(pipeline.placement):
        if low > high or device not in (low, high):
            continue
        times = []
        for _ in range(_ROUND_TRIPS + 1):
            _wait_for_device(payload)
            begin = time.perf_counter()
            if device == low:
                dist.send(payload, ranks[high], group=groups[low, high])
                dist.recv(payload, ranks[high], group=groups[high, low])
            else:
                dist.recv(payload, ranks[low], group=groups[low, high])
                dist.send(payload, ranks[low], group=groups[high, low])
            _wait_for_device(payload)
            times.append(time.perf_counter() - begin)
        if device == low:
            seconds[low, high] = seconds[high, low] = median(times[1:]) / 2
    return seconds


def _wait_for_device(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
