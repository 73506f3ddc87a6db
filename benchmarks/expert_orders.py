"""Search orders with pairs for four models with experts, and compare them with stock Megatron-Core's own pairs.

Claim: in the bytes of stock's fastest interleaved schedule with pairs that fits the devices, a searched order is not
slower. Seconds are those of the pipeline by the planner's prices. ``docs/experts.md`` has the table.

    python benchmarks/expert_orders.py            # print the table
    python benchmarks/expert_orders.py --write    # and put it into the page
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import PipememError
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.files import write_whole
from megatron_pipemem.model.model import Model, Recompute
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import EP_OVERLAP, Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.step import PlannedStep
from megatron_pipemem.tools.planner.variants import run_step

PAGE, MARK = Path(__file__).parents[1] / "docs" / "experts.md", "orders of experts"
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """A model on a number of devices. Its multi-token prediction is left out, which pairs do not run."""

    name: str
    model: str
    cluster: str
    cut: Parallelism  # for one microbatch
    microbatches: int
    recompute: Recompute = "none"

    def run(self) -> Run:
        cut, cluster = self.cut.with_microbatches(self.microbatches), load(self.cluster, Cluster)
        return Run(
            replace(load(self.model, Model), mtp_layers=0),
            replace(cluster, nodes=cut.ranks // cluster.devices_per_node),
            cut,
            ScheduleChoice(recompute=self.recompute),
            flags={"bf16": True, "use-distributed-optimizer": True, EP_OVERLAP: True},
        )


SETTINGS = (
    Setting("DeepSeek-V3", "deepseek-v3", "h200-141g", Parallelism(pp=16, dp=64, ep=64), 32, "selective"),
    Setting(
        "Qwen3-235B", "qwen3-235b-a22b", "h100-80g", Parallelism(tp=4, pp=16, dp=8, ep=8, sequence_parallel=True), 16
    ),
    Setting(
        "GLM-4.5",
        "glm-4.5",
        "h200-141g",
        Parallelism(tp=2, pp=8, dp=8, ep=16, etp=1, sequence_parallel=True),
        64,
        "selective",
    ),
    Setting("GPT-OSS-120B", "gpt-oss-120b", "h100-80g", Parallelism(pp=4, dp=16, ep=16), 16),
)


@dataclass(frozen=True)
class Priced:
    """A simulated order with its planned step."""

    step: PlannedStep
    timeline: Timeline

    @property
    def held(self) -> float:
        return max(self.step.held(self.timeline.peaks))

    @property
    def seconds(self) -> float:
        return self.timeline.makespan


def stocks(run: Run) -> Priced:
    """Return stock's fastest interleaved schedule with pairs, of those that fit the devices."""
    p, m = run.parallelism.pp, run.parallelism.microbatches
    rows = []
    for chunks in range(2, 9):
        step = run_step(run, Placement.interleaved(p, chunks))
        order = build_schedule("interleaved", num_devices=p, num_microbatches=m, chunks=chunks)
        rows.append(Priced(step, with_pairs(order, step.costs)))
    return min((row for row in rows if row.held <= run.cluster.memory_bytes), key=lambda row: row.seconds)


def ours(run: Run, limit: float, placements: tuple[Placement, ...], seconds: float) -> Priced:
    """Return the fastest order that is found within ``limit`` bytes per device."""
    rows = []
    for placement in placements:
        step = run_step(run, placement)
        request = Request.for_search(MemoryCap(step.room(limit), True), {"seconds": seconds})
        try:
            shape = Shape(run.parallelism.pp, None, run.parallelism.microbatches)
            chosen = choose(replace(request, pairs=True), shape, Knowledge(step.costs, placement=placement))
        except PipememError:
            continue
        rows.append(Priced(step, simulate(chosen.schedule, step.costs)))
    return min(rows, key=lambda row: row.seconds)


def bound_with_ramps(
    placement: Placement, num_microbatches: int, costs: Costs, room: Sequence[float] | None = None
) -> float:
    """Return a lower bound for steps with pairs, in which the first forwards and the last backwards have no partner.

    Before its first I, a device waits for a microbatch to pass all stages, and runs some F alone. After its last F, a
    microbatch has to pass back, and the device runs some I alone. As many as it runs there are held at once, within
    ``room``. W run after the first I. The bound is the least over the numbers of F and I, and of pairs of both, on the device
    for which it is largest.
    """
    n, seconds, place = placement.num_stages, costs.seconds(placement), placement.devices
    forward, inputs, weights = (np.array(seconds[kind]) for kind in (Kind.F, Kind.I, Kind.W))
    sent, returned = (np.array(costs.exchange_seconds(placement)[kind]) for kind in (Kind.F, Kind.I))
    links = [costs.link_seconds(*ends) if ends[0] != ends[1] else 0.0 for ends in pairwise(place)]
    bound = 0.0
    for device in range(placement.num_devices):
        own = [stage for stage in range(n) if place[stage] == device]
        first, last, count = own[0], own[-1], len(own) * num_microbatches

        def least(values: np.ndarray, own: list[int] = own) -> np.ndarray:
            """Return the least sums of 0, 1, 2, ... of the device's microbatches."""
            return np.array([0.0, *np.cumsum(np.sort(np.repeat(values[own], num_microbatches)))])

        arrival = sum(forward[:first]) + sum(links[:first])
        before = sum(forward) + sum(links) + sum(inputs[last + 1 :]) + sum(links[last:])
        after = sum(forward[last + 1 :]) + sum(links[last:]) + sum(inputs) + sum(links)
        alone, back = least(forward), least(inputs)
        computing = least(forward - sent) + least(inputs - returned)
        both = np.maximum(computing, least(sent) + least(returned))
        all_weights = num_microbatches * sum((weights - np.minimum(returned, weights) / 2)[own])
        most = count
        if room is not None and costs.memory is not None:
            most = int(np.searchsorted(least(np.array(costs.memory[Kind.F])), room[device], side="right")) - 1
        # Either all F run before the first I, or the last F runs after it.
        of_device = max(max(before, arrival + alone[count]) + back[count], arrival + alone[count] + after)
        of_device = of_device if most == count else math.inf
        for pairs in range(count + 1):
            single = count - pairs
            x = np.arange(min(most, single, count - 1) + 1)[:, None]
            y = np.arange(min(most, single) + 1)[None, :]
            begin = np.maximum(before, arrival + alone[x])
            rest = alone[single - x] + back[single - y]
            middle = np.maximum(both[pairs] + np.maximum(after, back[y]), computing[pairs] + back[y] + all_weights)
            of_device = min(of_device, (begin + rest + middle).min())
        bound = max(bound, of_device)
    return bound


def cells(setting: Setting, seconds: float) -> tuple[str, ...]:
    """Return the row of one setting."""
    run = setting.run()
    stock = stocks(run)
    p = run.parallelism.pp
    searched = ours(run, stock.held, (stock.step.placement, Placement.v_shape(p)), seconds)
    problem = searched.step.placement, setting.microbatches, searched.step.costs
    room = searched.step.room(stock.held)
    bound = max(lower_bound(*problem, pairs=True), bound_with_ramps(*problem, room))
    cut = f"TP{run.parallelism.tp} PP{p} EP{run.parallelism.ep}, m = {setting.microbatches}"
    return (
        f"{setting.name} {cut}",
        f"{stock.seconds:.3f} ({stock.step.placement.num_chunks} chunks)",
        f"{stock.held / GIB:.1f}",
        f"{searched.seconds:.3f} ({searched.step.placement.name}, {searched.step.placement.num_chunks})",
        f"{searched.held / GIB:.1f}",
        f"{searched.seconds / stock.seconds - 1:+.1%}",
        f"{bound:.3f}",
    )


HEADINGS = ("setting", "stock's pairs, s", "GiB", "searched, s", "GiB", "change", "bound, s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3, help="of every search (default: %(default)g)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/experts.md")
    given = parser.parse_args()
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(cells(setting, given.seconds) for setting in SETTINGS)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    Console(width=1000, highlight=False).print(table, markup=False)
    if given.write:
        begin, end = f"<!-- {MARK} -->\n", f"\n<!-- end of {MARK} -->"
        before, _, rest = PAGE.read_text().partition(begin)
        write_whole(PAGE, before + begin + table + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
