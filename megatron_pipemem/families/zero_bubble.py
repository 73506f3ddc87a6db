"""Zero-bubble families: ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2), and orders fitted to costs and memory (3.1)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product, starmap
from math import inf
from typing import NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.blocks import Pass, in_microbatch_order
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.family import PEAK_OF_1F1B, PEAK_OF_PARTS, Formula, built_in
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units


def zb_h1(num_devices: int, units: Units) -> Schedule:
    """Build ZB-H1 in 1F1B's memory.

    With whole microbatches, device ``r`` runs ``p - r`` forwards ahead, and W ``r`` microbatches after I.
    """
    return _zb("zb-h1", num_devices, units, turns=1)


def zb_h2(num_devices: int, units: Units) -> Schedule:
    """Build ZB-H2. With unit costs and ``m >= 2p - 1`` no device idles between its first and last pass.

    With whole microbatches it takes ``2 - 1/p`` of 1F1B's memory, and less with parts.
    """
    return _zb("zb-h2", num_devices, units, turns=2)


def _zb(name: str, p: int, units: Units, turns: int) -> Schedule:
    """Return the schedule in which W of device ``r`` run ``turns * r`` units after I."""
    passes = (_device_passes(r, len(units), turns * (p - r - 1) + 1 + units.lead, turns * r) for r in range(p))
    return in_microbatch_order(name, Placement.linear(p), units, passes)


def _device_passes(device: int, num_units: int, forwards_ahead: int, delay: int) -> list[Pass]:
    # ZB-H1, p = 3, m = 5: forwards ahead | I, W (``delay`` units later) and F in turn | W that are left
    #   device 0: F0 F1 F2 | I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4 |
    #   device 1: F0 F1    | I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 | W4
    #   device 2: F0       | I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 | W3 W4
    forward, backward, weight = Pass(Kind.F, device), Pass(Kind.I, device), Pass(Kind.W, device)
    passes = [forward] * min(num_units, forwards_ahead)
    for place in range(num_units):
        passes.append(backward)
        if place >= delay:
            passes.append(weight)
        if place + forwards_ahead < num_units:
            passes.append(forward)
    return passes + [weight] * min(num_units, delay)


ZB_H1 = built_in(
    name="zb-h1",
    build=zb_h1,
    summary="1F1B's memory; weight gradients run when nothing else can. A third of its bubble if F, I and W are equally long.",
    peak=PEAK_OF_PARTS,
    bubble=Formula("(p-1)(F+I-W)/n", lambda p, f, i, w, n, **_: (p - 1) * (f + i - w) / n),
    source="arXiv 2401.10241, section 2.1",
    in_parts=True,
    placement="linear",
    splits_backward=True,
)
ZB_H2 = built_in(
    name="zb-h2",
    build=zb_h2,
    summary="Up to twice 1F1B's memory; if F, I and W are equally long, devices never idle between their first and last pass.",
    peak=Formula("(2p+n-2)/(pn)", lambda p, m, n, **_: min(2 * p + n - 2, m * n) / (p * n)),
    bubble=Formula(
        "(p-1)F/n if F = I = W, all of it outside of a device's first and last pass",
        lambda p, f, n, **_: (p - 1) * f / n,
    ),
    source="arXiv 2401.10241, section 2.2",
    in_parts=True,
    placement="linear",
    splits_backward=True,
)


NAME = "zb-auto"


def zb_auto(
    num_devices: int, num_microbatches: int, costs: Costs | None = None, memory_cap: float | None = None
) -> Schedule:
    """Return the fastest schedule within the cap (by default 1F1B's memory) of greedy orders, ZB-H1 and ZB-H2.

    The greedy orders differ in the number of forwards ahead. They also differ in how long an idle device waits for
    data of an F or I in place of running a W. Schedules are compared by the makespan, then by the longest time from a
    device's first pass to its last.
    """
    p, costs, cap = num_devices, costs or Costs(), 1.0 if memory_cap is None else memory_cap
    most = int(loosened(cap * p))
    if most < 1:
        raise UnsupportedError(
            "cap-unreachable",
            f"{NAME} holds at least {1 / p:.4g} activation units on {p} devices, for one microbatch of a stage; raise "
            f"the memory cap of {cap:.4g}",
        )
    policies = starmap(_Policy, product(dict.fromkeys(_forwards_ahead(costs, p, most)), (0.0, 0.5, 1.0)))
    # The best policy for a few microbatches is the best for many, because a longer steady state repeats its rhythm.
    few = min(num_microbatches, 2 * p + 8)
    best = min(policies, key=lambda policy: _quality(_greedy(costs, policy, few, most), costs))
    candidates, units = [_greedy(costs, best, num_microbatches, most)], Units.equal(num_microbatches)
    for forwards, build in ((p, zb_h1), (2 * p - 1, zb_h2)):
        if most >= forwards:
            candidates.append(build(p, units))
    chosen = min(candidates, key=lambda schedule: _quality(schedule, costs))
    return Schedule(NAME, chosen.placement, units, chosen.orders)


class _Policy(NamedTuple):
    """The parameters of a greedy order.

    ``ahead``: per device, the most microbatches that have run F and not yet I. ``patience``: a device waits for an F
    or I in place of running W if the data arrive within this share of the seconds of W.
    """

    ahead: tuple[int, ...]
    patience: float


def _forwards_ahead(costs: Costs, p: int, most: int) -> list[tuple[int, ...]]:
    """Return three choices of forwards ahead per device: few, many, and the mean of both.

    Few are those of 1F1B. Many are as many as end before the first gradient can return. None is above ``most``, the
    most microbatches that the cap allows on a device.
    """
    seconds = costs.seconds(Placement.linear(p))
    forward, backward = seconds[Kind.F], seconds[Kind.I]
    few = [min(most, p - device) for device in range(p)]
    many = [1] * p
    round_trip = 0.0
    for device in reversed(range(p - 1)):
        links = costs.link_seconds(device, device + 1), costs.link_seconds(device + 1, device)
        round_trip += forward[device + 1] + backward[device + 1] + links[0] + links[1]
        while_waiting = int(loosened(round_trip / forward[device])) if forward[device] else most
        many[device] = min(most, max(many[device + 1], 1 + while_waiting))
    middle = [(low + high + 1) // 2 for low, high in zip(few, many, strict=True)]
    return [tuple(few), tuple(many), tuple(middle)]


def _quality(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    timeline = simulate(schedule, costs)
    # Rounded, because sums of the same seconds in another order may differ.
    return (float(f"{timeline.makespan:.9g}"), float(f"{timeline.device_bubble_rate:.9g}"))


def _greedy(costs: Costs, policy: _Policy, num_microbatches: int, most: int) -> Schedule:
    p = len(policy.ahead)
    passes: list[list[Pass]] = [[] for _ in range(p)]
    for device, kind in _run(costs, policy, num_microbatches, most):
        passes[device].append(Pass(kind, device))
    return in_microbatch_order(NAME, Placement.linear(p), Units.equal(num_microbatches), passes)


def _run(costs: Costs, policy: _Policy, m: int, most: int) -> Iterator[tuple[int, Kind]]:
    """Yield ``(device, kind)`` of the greedy order, in order of time.

    ``most`` microbatches at most are held by a device from F to W. There is no deadlock, because limits on younger
    microbatches never delay the oldest one.
    """
    last, seconds = len(policy.ahead) - 1, costs.seconds(Placement.linear(len(policy.ahead)))
    arrivals: dict[Kind, list[list[float]]] = {kind: [[] for _ in policy.ahead] for kind in (Kind.F, Kind.I)}
    ran = {kind: [0] * (last + 1) for kind in (Kind.F, Kind.I, Kind.W)}
    free = [0.0] * (last + 1)

    def coming(kind: Kind, device: int) -> float:
        """Return when the data of a device's next F or I arrive; infinity if that is unknown."""
        times, started = arrivals[kind][device], ran[kind][device]
        return times[started] if started < len(times) else inf

    def choose(device: int, now: float) -> Kind | None:
        """Return the kind that a device starts at ``now``; ``None`` if it waits for the next data."""
        forwards, gradients, weights = (ran[kind][device] for kind in (Kind.F, Kind.I, Kind.W))
        gradient, forward = coming(Kind.I, device), coming(Kind.F, device)
        if gradient <= now:
            return Kind.I
        if forwards - gradients >= policy.ahead[device]:
            forward = inf
        if forward <= now and forwards - weights < most:
            return Kind.F
        is_patient = forward > now and min(gradient, forward) - now < policy.patience * seconds[Kind.W][device]
        return Kind.W if gradients > weights and not is_patient else None

    arrivals[Kind.F][0] = [0.0] * m
    awake: list[tuple[float, int]] = [(0.0, 0)]
    while awake:
        now, device = heapq.heappop(awake)
        kind = choose(device, now) if now >= free[device] else None
        if kind is None:
            continue
        yield device, kind
        ran[kind][device] += 1
        end = free[device] = now + seconds[kind][device]
        heapq.heappush(awake, (end, device))
        if kind is Kind.F and device < last:
            receiver, arriving, arrival = device + 1, Kind.F, end + costs.link_seconds(device, device + 1)
        elif kind is Kind.F:
            receiver, arriving, arrival = device, Kind.I, end
        elif kind is Kind.I and device > 0:
            receiver, arriving, arrival = device - 1, Kind.I, end + costs.link_seconds(device, device - 1)
        else:
            continue
        arrivals[arriving][receiver].append(arrival)
        heapq.heappush(awake, (arrival, receiver))


ZB_AUTO = built_in(
    name=NAME,
    build=zb_auto,
    summary="A zero-bubble order that is fitted to measured costs and any memory cap (default: 1F1B's memory).",
    peak=PEAK_OF_1F1B,
    bubble=Formula("at most that of zb-h1; with a cap of 2, of zb-h2", lambda p, f, i, w, **_: (p - 1) * (f + i - w)),
    source="arXiv 2401.10241, section 3.1",
    outclassed_by="the search for a better order starts from zb-auto",
    options={
        "costs": "seconds of every pass to fit the order to (default F = I = W)",
        "memory_cap": "the most a device may hold (default 1)",
    },
    placement="linear",
    splits_backward=True,
)
