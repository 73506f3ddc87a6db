"""Compare two ways to keep inputs until W, as shards or gathered: bytes of schedules, and seconds of W.

Claim: with shards, `zb-h1`, `zbv`, `v-half` and `v-min` hold the shares of 1F1B's bytes that the papers give, `zb-h1` if the
head's weight gradient does not wait. With NVLink between the tensor-parallel ranks, W takes as long as without gathers. The
model is Llama-70B, sequence 4096, on 8 tensor-parallel ranks with sequence parallelism and Transformer Engine's layers.

    python benchmarks/weight_inputs.py               # bytes, by the planner's formulas
    python benchmarks/weight_inputs.py --early       # bytes and seconds of mixtures of experts, by modules whose W runs with I
    python benchmarks/weight_inputs.py --head        # bytes of all models under `zb-h1`, as published and with W earlier
    python benchmarks/weight_inputs.py --emulated    # seconds: the queue of W on a device and a link that sleep
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from rich.console import Console

from megatron_pipemem.files import write_whole
from megatron_pipemem.model.activations import gathered_in_weight, layer_bytes
from megatron_pipemem.model.counts import matrices
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient, WeightGradientQueue
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import SHIPPED, load
from megatron_pipemem.tools.planner.prices import gather
from megatron_pipemem.tools.planner.profile import from_formulas
from megatron_pipemem.tools.report.terminal import FittingTable

TP, SEQUENCE = 8, 4096
SCHEDULES = ("1f1b", "zb-h1", "zbv", "v-half", "v-min")
MODEL = replace(load("llama3-70b", Model), sequence=SEQUENCE)
CLUSTER = load("h100-80g", Cluster)
SHARDS = Execution(tp=TP, sequence_parallel=True, implementation="transformer_engine")
EXECUTIONS = {
    "gathered": replace(SHARDS, wgrad_inputs="gathered"),
    "shards": SHARDS,
    "shards, head in I": replace(SHARDS, early_wgrad="head"),
    "no sequence parallelism": replace(SHARDS, sequence_parallel=False),
}
EXPERTS = Execution(ep=8, implementation="transformer_engine")
MIXTURES = {
    "qwen3-235b-a22b": replace(EXPERTS, tp=4, sequence_parallel=True),
    "deepseek-v3": EXPERTS,
    "qwen3-30b-a3b": EXPERTS,
}
EARLY = ("none", "auto", "head,experts_fc2")
EARLY_BYTES = ("MiB of a layer", "after F", *(f"from I to W, `{setting}`" for setting in EARLY[:2]))
EARLY_SHARES = (
    "model",
    "schedule",
    "units",
    *(f"`{setting}`" for setting in EARLY),
    *(f"time, `{setting}`" for setting in EARLY[1:]),
)
COLUMNS = ("schedule", "p", "units", *EXECUTIONS)
RANKS = (4, 8, 16)
HEAD = ("model", "TP", "sequence", *(f"p = {p}" for p in RANKS), "time at p = 8")
PUBLISHED, EARLIER = "as published", "W earlier"
WAYS = (PUBLISHED, "head in I", EARLIER)
COMPARED = ("zb-h1", "cases", "largest share", "mean time", "longest time")


def shares(schedule: str, devices: int) -> list[float]:
    """Return a schedule's peak relative to 1F1B's: in activation units, and in bytes of each execution."""
    rows = []
    for execution in (None, *EXECUTIONS.values()):
        costs = None if execution is None else from_formulas(MODEL, execution, CLUSTER).costs()
        ours, first = (max(peaks(build(name, devices), costs)) for name in (schedule, "1f1b"))
        rows.append(ours / first)
    return rows


def build(schedule: str, devices: int) -> Schedule:
    return build_schedule(schedule, num_devices=devices, num_microbatches=2 * devices)


def rows() -> list[tuple[str, ...]]:
    return [
        (f"`{name}`", str(devices), *(f"{share:.2f}" for share in shares(name, devices)))
        for devices in (4, 8)
        for name in SCHEDULES
    ]


def early_bytes() -> list[tuple[str, ...]]:
    """Return the bytes of a layer with experts after F, and from I to W."""
    lines = []
    for name, execution in MIXTURES.items():
        model = replace(load(name, Model), sequence=SEQUENCE)
        kept = [layer_bytes(model, replace(execution, early_wgrad=setting), model.main_kind) for setting in EARLY[:2]]
        lines.append((name, *(f"{nbytes / 2**20:.0f}" for nbytes in (kept[0].saved, *(k.after_input for k in kept)))))
    return lines


def early_shares(devices: int = 8) -> list[tuple[str, ...]]:
    """Return peaks relative to 1F1B's, and makespans relative to schedules in which every W waits."""
    lines = []
    for name, execution in MIXTURES.items():
        model = replace(load(name, Model), sequence=SEQUENCE)
        costs = [from_formulas(model, replace(execution, early_wgrad=setting), CLUSTER).costs() for setting in EARLY]
        for schedule in SCHEDULES[1:]:
            ours, first = build(schedule, devices), build("1f1b", devices)
            held = [max(peaks(ours, prices)) / max(peaks(first, prices)) for prices in (None, *costs)]
            took = [simulate(ours, cost).makespan for cost in costs]
            shown = [*held, *(duration / took[0] for duration in took[1:])]
            lines.append((name, f"`{schedule}`", *(f"{cell:.2f}" for cell in shown)))
    return lines


class Held(NamedTuple):
    """The bytes of `zb-h1`'s fullest rank over those of 1F1B's fullest, and its makespan."""

    share: float
    seconds: float


def ways(name: str, devices: int) -> dict[str, Held]:
    """Return what `zb-h1` holds, as published and with the changes of `WAYS`."""
    model, execution = public(name)
    published, first = build("zb-h1", devices), build("1f1b", devices)
    early = replace(execution, early_wgrad="head,experts_fc2" if model.experts else "head")
    costs, of_early = (from_formulas(model, cut, CLUSTER).costs() for cut in (execution, early))
    whole = max(peaks(first, costs))

    def held(schedule: Schedule, costs: Costs) -> Held:
        return Held(max(peaks(schedule, costs)) / whole, simulate(schedule, costs).makespan)

    ours = (held(published, costs), held(published, of_early), held(with_earlier_weights(published, costs), costs))
    return dict(zip(WAYS, ours, strict=True))


def public(name: str) -> tuple[Model, Execution]:
    """Return a model of the package, and its execution: TP8, or with experts EP8 and TP4, less if heads do not divide."""
    model = load(name, Model)
    tp = 1 if model.hidden <= 2048 else 4 if model.experts else 8
    while model.heads % tp:
        tp //= 2
    return model, replace(EXPERTS if model.experts else SHARDS, tp=tp, sequence_parallel=tp > 1)


@cache
def of_all_models() -> dict[str, dict[int, dict[str, Held]]]:
    names = sorted(path.stem for path in (SHIPPED / Model.config_folder).glob("*.yaml"))
    return {name: {p: ways(name, p) for p in RANKS} for name in names if name != "tiny-gpt"}


def head_rows() -> list[tuple[str, ...]]:
    """Return for every model the peak of `zb-h1` over that of 1F1B, as published and with W earlier, if that differs."""
    lines = []
    for name, sizes in of_all_models().items():
        model, execution = public(name)
        pairs = [(held[PUBLISHED].share, held[EARLIER].share) for held in sizes.values()]
        shown = [
            f"{published:.2f}" if published == moved else f"{published:.2f}, {moved:.2f}" for published, moved in pairs
        ]
        times = f"{sizes[8][EARLIER].seconds / sizes[8][PUBLISHED].seconds:.3f}"
        lines.append((name, str(execution.tp), f"{model.sequence}", *shown, times))
    return lines


def way_rows() -> list[tuple[str, ...]]:
    """Return the largest share of 1F1B's bytes and the times of each way, over all models and `RANKS` above 1F1B's bytes."""
    above = [
        held for sizes in of_all_models().values() for held in sizes.values() if held[PUBLISHED].share > loosened(1.0)
    ]
    lines = []
    for way in WAYS:
        times = [held[way].seconds / held[PUBLISHED].seconds for held in above]
        numbers = (max(held[way].share for held in above), fmean(times), max(times))
        lines.append((way, str(len(above)), f"{numbers[0]:.2f}", *(f"{number:.3f}" for number in numbers[1:])))
    return lines


@dataclass
class PretendedProduct(DeferredWeightGradient):
    """The weight gradient of one layer. Its gather and its product, in seconds, sleep."""

    gather: Callable[[], Future]
    product: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return ()

    def begin(self) -> None:
        self.arriving = self.gather()

    def run(self) -> None:
        self.arriving.result()
        time.sleep(self.product)


def measure(link: str, layers: int, layer_seconds: float, repeats: int) -> dict[str, float | str]:
    """Return the seconds of W with gathers over a link, relative to W without gathers, as measured and as priced.

    ``link`` is ``intra_node`` or ``inter_node``, and a layer's products sleep for ``layer_seconds``. The fastest of
    ``repeats`` counts.
    """
    kind, between = MODEL.main_kind, getattr(CLUSTER, link)
    products = [matrix for block in kind for matrix in matrices(MODEL, SHARDS, block)]
    seconds = [2 * MODEL.sequence * product.inputs * product.outputs / TP / CLUSTER.flops for product in products]
    widths = [gathered_in_weight(MODEL, SHARDS, [product]) for product in products]
    gathers = [sum(gather(nbytes, TP, between) for nbytes in width) for width in widths]
    scale = layer_seconds / sum(seconds)

    def run(with_gathers: bool) -> float:
        with ThreadPoolExecutor(1) as wire:
            queue = WeightGradientQueue()
            for _ in range(layers):
                for product, arrives in zip(reversed(seconds), reversed(gathers), strict=True):
                    waits = arrives * scale * with_gathers
                    queue.put(PretendedProduct(partial(wire.submit, time.sleep, waits), product * scale))
            begin = time.perf_counter()
            queue.run()
            return time.perf_counter() - begin

    pairs = [(run(True), run(False)) for _ in range(repeats)]
    return {
        "link": link,
        "gathers_ms": 1e3 * sum(gathers),
        "products_ms": 1e3 * sum(seconds),
        "measured": min(one for one, _ in pairs) / min(other for _, other in pairs),
        "planned": max(1.0, sum(gathers) / sum(seconds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="measure W on a device that sleeps")
    parser.add_argument("--head", action="store_true", help="compare zb-h1 as published with W earlier, for all models")
    parser.add_argument("--early", action="store_true", help="compare modules whose W runs with I")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--layer-ms", type=float, default=200.0, help="length of the products of a layer")
    parser.add_argument("--repeats", type=int, default=3)
    asked, console = parser.parse_args(), Console()
    written: object
    if asked.emulated:
        links = ("intra_node", "inter_node")
        written = timings = [measure(link, asked.layers, asked.layer_ms / 1e3, asked.repeats) for link in links]
        lines = [
            [f"{value:.2f}" if isinstance(value, float) else value for value in timing.values()] for timing in timings
        ]
        show(console, tuple(timings[0]), lines, "ratio of W's seconds with gathers to those without: measured, planned")
    elif asked.head:
        written = shown = head_rows()
        shares_of_bytes = (
            "peak bytes of zb-h1's fullest rank / 1F1B's: as published, and with W earlier if that differs"
        )
        show(console, HEAD, shown, f"p: {shares_of_bytes}; time: a step with W earlier / as published")
        show(console, COMPARED, way_rows(), "share: of 1F1B's peak bytes; time: of a step / as published")
    elif asked.early:
        written = shown = early_shares()
        show(console, EARLY_BYTES, early_bytes(), "`none`, `auto`: values of --pipemem-early-wgrad")
        by_setting = "peak bytes / 1F1B's, by the setting; time: of a step / with `none`; 8 ranks"
        show(console, EARLY_SHARES, shown, f"units: peak / 1F1B's by layers alone; others: {by_setting}")
    else:
        kept = {name: layer_bytes(MODEL, execution) for name, execution in EXECUTIONS.items()}
        after = [
            ("after F", *(f"{way.saved / 2**20:.0f}" for way in kept.values())),
            ("from I to W", *(f"{way.after_input / 2**20:.0f}" for way in kept.values())),
        ]
        show(console, ("MiB of a layer", *kept), after, "kept activations, by the inputs that wait for W")
        written = shown = rows()
        by_layers = "units: peak / 1F1B's by layers alone; others: peak bytes / 1F1B's"
        show(console, COLUMNS, shown, f"{by_layers}, by the inputs that wait for W; p ranks, 2p microbatches")
    path = (
        Path("out/benchmarks")
        / f"weight_inputs{'_emulated' if asked.emulated else '_early' if asked.early else ''}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(written, indent=1))


def show(console: Console, columns: Sequence[str], lines: Iterable[Sequence[str]], caption: str) -> None:
    table = FittingTable(tuple(columns), caption=caption)
    for line in lines:
        table.add_row(*line)
    console.print(table)


if __name__ == "__main__":
    main()
