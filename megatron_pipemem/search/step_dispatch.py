"""Order the actions of a step whose microbatches are not alike: greedily, as time goes on, within a memory cap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import starmap
from typing import NamedTuple

from megatron_pipemem.schedule.action import PLAIN, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.schedule import Schedule

Ahead = Sequence[int] | None


class Dispatched(NamedTuple):
    """Hold the makespan in seconds, and per device its actions in order: kind, stage and position."""

    makespan: float
    orders: list[list[tuple[Kind, int, int]]]


class Dispatcher:
    """Order the actions of one step for any order of its microbatches.

    A device runs what is ready: a backward before a forward, the oldest first, and a W where it would idle otherwise. A forward
    starts only where the cap leaves room for it and for the later chunks of every microbatch in flight.

    Args:
        base: a schedule of ``PLAIN`` actions on one replica of the model. Stages that split backwards in it split them here.
        costs: with weights of the microbatches, in arrival order.
        caps: the most every device may hold, in the unit of the costs' memory.
    """

    def __init__(self, base: Schedule, costs: Costs, caps: Sequence[float]) -> None:
        self._base, weights = base, costs.microbatch
        assert weights is not None
        placement = base.placement
        kinds = {(kind, stage) for order in base.orders for kind, stage, _ in order}
        self._split = [(Kind.I, stage) in kinds for stage in range(placement.num_stages)]
        self._trains = any(kind is not Kind.F for kind, _ in kinds)
        seconds, changes = costs.seconds(placement), costs.memory_changes(placement)
        unit, nothing = costs.memory_unit(placement), (0.0,) * placement.num_stages
        self._changes = {kind: [each * unit for each in changes.get(kind, nothing)] for kind in PLAIN}
        own = {kind: weights.seconds_of(kind) for kind in PLAIN}
        self._seconds: dict[Kind, list[list[float]]] = {
            kind: [[price * weight for weight in own[kind]] for price in seconds[kind]]
            for kind in PLAIN
            if kind is not Kind.B
        }
        inputs, later = self._seconds[Kind.I], self._seconds[Kind.W]
        self._seconds[Kind.B] = (
            [[price * weight for weight in own[Kind.B]] for price in seconds[Kind.B]]
            if Kind.B in weights.kinds
            else [[i + w for i, w in zip(*pair, strict=True)] for pair in zip(inputs, later, strict=True)]
        )
        self._tokens, self._caps = weights.tokens, [loosened(cap) for cap in caps]
        devices = placement.devices
        links = list(zip(devices, devices[1:], strict=False))
        self._there = [*(costs.link_seconds(a, b) for a, b in links), 0.0]
        self._back = [0.0, *(costs.link_seconds(b, a) for a, b in links)]
        takes, grows = self._changes[Kind.F], self._changes[Kind.I]
        more = [max(0.0, each) if is_split else 0.0 for each, is_split in zip(grows, self._split, strict=True)]
        self._spare = [each + also for each, also in zip(takes, more, strict=True)]
        self._whole = [
            sum(takes[each] for each in stages) + max(more[each] for each in stages) for stages in placement.stages
        ]

    def run(self, order: Sequence[int], ahead: Ahead = None) -> Dispatched | None:
        """Return what microbatches in this order come to; ``None`` where the cap leaves no device room to go on.

        A hot loop: a plan tries dozens of orders, so it is one function with everything at hand.

        ``order``: the microbatch of every position, by its place in the weights. ``ahead``: per device, the most forwards
        that wait for their backward; ``None`` for as many as the cap admits.
        """
        stages_of, device_of, caps = self._base.placement.stages, self._base.placement.devices, self._caps
        last, m, trains, split = len(device_of) - 1, len(order), self._trains, self._split
        tokens = [self._tokens[each] for each in order]
        forward, inputs, later, full = ([[row[k] for k in order] for row in self._seconds[kind]] for kind in PLAIN)
        takes, keeps, frees, gives = (self._changes[kind] for kind in PLAIN)
        spare = self._spare
        # What younger microbatches may take on a device before one finds no room for all its chunks, were older ones gone.
        slack = [[cap - each * whole for each in tokens] for cap, whole in zip(caps, self._whole, strict=True)]
        ready_f, ready_b = [[math.inf] * m for _ in device_of], [[math.inf] * m for _ in device_of]
        ready_f[0] = [0.0] * m
        done_f, done_b, done_w = ([0] * len(device_of) for _ in range(3))
        held, busy = [0.0] * len(stages_of), [0.0] * len(stages_of)
        ran: list[list[tuple[Kind, int, int]]] = [[] for _ in stages_of]
        left = sum(1 if not trains else 3 if each else 2 for each in split) * m
        events = [(0.0, device) for device in range(len(stages_of))]
        while events:
            now, device = heappop(events)
            if busy[device] > now:
                continue
            stages, kind, chosen, best = stages_of[device], Kind.F, -1, math.inf
            for stage in stages:
                k = done_b[stage]
                if k < m and k < best and ready_b[stage][k] <= now:
                    chosen, best = stage, k
            if chosen >= 0:
                kind = Kind.I if split[chosen] else Kind.B
            elif ahead is None or sum(done_f[s] - done_b[s] for s in stages) < ahead[device]:
                room = caps[device] - held[device]
                for stage in stages:
                    k = done_f[stage]
                    if k < m and ready_f[stage][k] <= now and k < best:
                        if tokens[k] * spare[stage] > room:
                            continue
                        older = slack[device][done_f[stages[-1]] : k]
                        if older and tokens[k] * takes[stage] > min(older):
                            continue
                        chosen, best = stage, k
            if chosen < 0:
                for stage in stages:
                    if done_w[stage] < done_b[stage] and split[stage] and done_w[stage] < best:
                        chosen, best, kind = stage, done_w[stage], Kind.W
                if chosen < 0:
                    continue
            if kind is Kind.F:
                k = done_f[chosen]
                done_f[chosen] = k + 1
                end, change, after = now + forward[chosen][k], takes[chosen], chosen + 1
                for before in range(done_f[stages[-1]], k):
                    slack[device][before] -= change * tokens[k]
                if chosen == last:
                    ready_b[chosen][k] = end if trains else math.inf
                else:
                    ready_f[after][k] = end + self._there[chosen] * tokens[k]
                    heappush(events, (ready_f[after][k], device_of[after]))
            elif kind is Kind.W:
                k = done_w[chosen]
                done_w[chosen] = k + 1
                end, change = now + later[chosen][k], frees[chosen]
            else:
                k = done_b[chosen]
                done_b[chosen] = k + 1
                is_split = kind is Kind.I
                end = now + (inputs if is_split else full)[chosen][k]
                change = (keeps if is_split else gives)[chosen]
                if chosen:
                    ready_b[chosen - 1][k] = end + self._back[chosen] * tokens[k]
                    heappush(events, (ready_b[chosen - 1][k], device_of[chosen - 1]))
            held[device] += change * tokens[k]
            busy[device] = end
            ran[device].append((kind, chosen, k))
            left -= 1
            heappush(events, (end, device))
        return None if left else Dispatched(max(busy), ran)

    def schedule(self, found: Dispatched) -> Schedule:
        """Return a dispatched step as a schedule."""
        orders = tuple(tuple(starmap(Action, order)) for order in found.orders)
        return replace(self._base, orders=orders)
