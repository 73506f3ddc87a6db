"""The channel of the collectives: one process group, served in the order in which all devices post."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_pipemem.schedule.core.action import Action, Kind


class CollectiveTransfer(NamedTuple):
    """A collective that all devices have posted. Seconds."""

    kind: Kind
    microbatch: int
    start: float
    end: float


class CollectiveChannel:
    """When collectives run. Each starts when every device has posted it and has ready what it brings, and the one before
    has ended.

    Args:
        num_devices: how many post each.
        seconds: of every kind of collective.
    """

    def __init__(self, num_devices: int, seconds: Mapping[Kind, float]) -> None:
        self._num_devices = num_devices
        self._seconds = seconds
        self._posted: dict[tuple[Kind, int], tuple[int, float]] = {}
        self.transfers: list[CollectiveTransfer] = []

    def post(self, action: Action, ready: float) -> CollectiveTransfer | None:
        """One device's post; the transfer, when this was the last one."""
        key = (action.kind, action.microbatch)
        posts, latest = self._posted.get(key, (0, ready))
        posts, latest = posts + 1, max(latest, ready)
        self._posted[key] = (posts, latest)
        if posts < self._num_devices:
            return None
        start = max(latest, self.transfers[-1].end if self.transfers else latest)
        self.transfers.append(CollectiveTransfer(*key, start, start + self._seconds[action.kind]))
        return self.transfers[-1]
