"""Compare the planner's predictions with the measurements of papers on the same setups.

Claim: with one set of efficiencies, that of the cluster ``a100-80g``, the planner ranks schedules and cuts as the
papers' measurements do. No row has a fit of its own, and the table shows where planner and paper differ.

    python benchmarks/papers.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import add
from pathlib import Path

from published.vocabulary_1f1b import step_seconds
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_pipemem.files import write_whole
from megatron_pipemem.model import layout
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.display import doing
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.stream import consecutive_steps
from megatron_pipemem.tools.cli.common import showing
from megatron_pipemem.tools.config.cluster import GIB, Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.prices import CHEAP
from megatron_pipemem.tools.planner.space import Limits
from megatron_pipemem.tools.planner.step import mfu, price
from megatron_pipemem.tools.planner.variants import PLAIN, run_step, variants
from megatron_pipemem.tools.planner.ways import Answer

MACHINE = "a100-80g"
DEVICES_PER_NODE = 8

# arXiv 2405.15362, table 3: best MFU of a grid search over 40 devices; paper's name, family, recompute.
GRID_SEARCH = {
    (1024, 160): (49.81, 37.15, 54.52, 52.60, 48.02, 57.58),
    (3072, 640): (57.25, 45.81, 56.55, 60.34, 55.51, 56.89),
}
GRID_ROWS = (
    ("1F1B", "1f1b", "none"),
    ("1F1B-R", "1f1b", "full"),
    ("ZB-1P", "zb-h1", "none"),
    ("V-Half", "v-half", "none"),
    ("V-Min", "v-min", "none"),
    ("V-ZB", "zbv", "none"),
)

# arXiv 2503.01328, figure 11: pure pipelines with offload against TP8 x PP4 interleaved, 12 to 19 % faster; batch 256.
OFFLOADED = (("po-42.9b", 16384), ("po-66.6b", 16384), ("po-83.8b", 8192))
OFFLOAD = "offload"
OFFLOAD_GAIN = "12 to 19 % faster"
# GiB of a node, half of it for activations. The paper does not state its nodes' memory. It says that the 42.9B model ran at 16k
# with everything offloaded, and that 32k did not fit the host. That takes 870 and 1739 GiB of a node.
HOST_MEMORY = (2048, 1024)

# arXiv 2411.05288, table 5: model, devices, sequence -> per method MFU with vocabularies of 32k, 64k, 128k and 256k.
VOCABULARIES = (32768, 65536, 131072, 262144)
VOCABULARY = {
    ("vocab-4b", 8, 2048): {
        "baseline": (46.16, 40.48, 33.11, 25.23),
        "redistributed": (46.01, 46.37, 44.22, 38.91),
        "vocabulary-1": (50.42, 50.28, 49.93, 50.12),
        "vocabulary-2": (50.23, 50.18, 49.82, 49.69),
    },
    ("vocab-10b", 16, 2048): {
        "baseline": (45.66, 40.09, 32.44, 24.21),
        "redistributed": (45.56, 42.82, 38.65, 36.98),
        "vocabulary-1": (49.02, 50.62, 50.54, 50.66),
        "vocabulary-2": (48.90, 50.49, 50.46, 50.46),
    },
    ("vocab-21b", 32, 2048): {
        "baseline": (42.81, 37.28, 28.97, 20.86),
        "redistributed": (43.48, 37.29, 36.32, 29.16),
        "vocabulary-1": (45.85, 45.92, 45.90, 46.11),
        "vocabulary-2": (45.54, 45.86, 45.86, 46.16),
    },
    ("vocab-4b", 8, 4096): {
        "baseline": (47.05, 41.87, 35.00, 26.75),
        "redistributed": (46.93, 46.78, 47.44, 43.01),
        "vocabulary-1": (50.98, 50.98, 50.83, 50.66),
        "vocabulary-2": (50.93, 50.75, 50.56, 50.40),
    },
    ("vocab-10b", 16, 4096): {
        "baseline": (47.56, 41.21, 33.88, 25.33),
        "redistributed": (47.41, 43.07, 43.15, 40.15),
        "vocabulary-1": (50.93, 50.97, 50.71, 51.22),
        "vocabulary-2": (50.97, 50.80, 50.68, 50.90),
    },
    ("vocab-21b", 32, 4096): {
        "baseline": (43.68, 38.11, 30.05, 21.63),
        "redistributed": (44.01, 38.12, 37.87, 31.03),
        "vocabulary-1": (46.41, 46.44, 46.68, 46.83),
        "vocabulary-2": (46.23, 46.35, 46.55, 46.84),
    },
}
VOCABULARY_MICROBATCHES = 128

MISSES = {
    "grid": "V-ZB at 1024 gains less, because all devices begin a step together here. If each began after its own last step, "
    "as with the post-validated optimizer of arXiv 2401.10241, only V-ZB would gain: that ratio is in the notes.",
    "offload": "Stages hold whole layers. If these do not divide among 32 devices, the bound of PP32 shows the possible gain. "
    "The host's memory is an assumption, so two sizes are shown.",
    "vocabulary": "If layers move away, our partition sometimes finds a better split than the paper's. Cut heads have the "
    "order of the paper's code, which exchanges messages while a device is idle; the notes have our order, which does not.",
}
"""Main reasons of the differences between planner and paper."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    setup: str
    paper: float | None  # measured by the paper, in its unit; ``None`` if it gives a range or nothing
    planner: float | None  # predicted; ``None`` if the planner cannot predict it
    relative_paper: float | None  # relative to the baseline of the setup
    relative_planner: float | None
    note: str = ""  # cut and memory, or the reason of a missing prediction


def _told[T](items: Sequence[T], name: str) -> Iterator[T]:
    """Yield the items, and show on stderr how many there are."""
    for number, item in enumerate(items, 1):
        with doing(f"{name}, {number} of {len(items)}"):
            yield item


def machine(devices: int) -> Cluster:
    return replace(load(MACHINE, Cluster), nodes=devices // DEVICES_PER_NODE)


def grid_search() -> dict[str, list[Row]]:
    """Return the best plan of every schedule, with any cut.

    Every W runs where the paper's schedule has it. The notes have the ratio if W move (``schedule.earlier_weights``).
    """
    tables = {}
    for (sequence, batch), paper in GRID_SEARCH.items():
        model = replace(load("cm-98.5b", Model), sequence=sequence)
        run = Run(model, machine(40), Parallelism(global_batch=batch))
        published = replace(run, schedule=ScheduleChoice(early_wgrad="none"))
        answers, moved = (
            [
                _best(order, schedule=(family,), recompute=(recompute,), variant=(PLAIN,))
                for _, family, recompute in _told(GRID_ROWS, f"98.5B at {sequence}")
            ]
            for order in (published, run)
        )
        base = answers[0].plans
        tables[f"arXiv 2405.15362, table 3: 98.5B on 40 devices, sequence {sequence}, batch {batch}: MFU %"] = [
            Row(
                name,
                mfu_of_paper,
                100 * answer.plans[0].mfu if answer.plans else None,
                mfu_of_paper / paper[0],
                answer.plans[0].mfu / base[0].mfu if answer.plans and base else None,
                _without_barrier(answer, answers[0]) + _moved(ours, answer, answers[0]) + _cut(answer),
            )
            for (name, _, _), mfu_of_paper, answer, ours in zip(GRID_ROWS, paper, answers, moved, strict=True)
        ]
    return tables


def _moved(ours: Answer, published: Answer, base: Answer) -> str:
    """Return the ratio of MFUs if W move as this package moves them, or nothing if that changes nothing."""
    if not ours.plans or not published.plans or not base.plans or ours.plans[0].mfu == published.plans[0].mfu:
        return ""
    return f"W moved {ours.plans[0].mfu / base.plans[0].mfu:.3f}; "


def _without_barrier(answer: Answer, base: Answer) -> str:
    """Return the ratio of MFUs if every device began a step as soon as it has finished the one before."""
    if not answer.plans or not base.plans:
        return ""
    reached = []
    for best in (answer.plans[0], base.plans[0]):
        cut = best.run.parallelism
        schedule = build_schedule(best.schedule, num_devices=cut.pp, num_microbatches=cut.microbatches)
        reached.append(
            mfu(best.run, consecutive_steps(schedule, best.step.costs, steps=2).period + best.step.outside_seconds)
        )
    return f"no barrier {reached[0] / reached[1]:.3f}; "


def offloaded() -> dict[str, list[Row]]:
    """Compare pure pipelines that offload with tensor parallelism."""
    known = {variant.name for variant in variants()}
    rows = []
    for name, sequence in _told(OFFLOADED, "offload"):
        run = Run(replace(load(name, Model), sequence=sequence), machine(32), Parallelism(global_batch=256))
        # The paper recomputes norms, activations and dropout masks whenever it offloads.
        cheap = replace(run, schedule=ScheduleChoice(recompute="selective", recompute_modules=CHEAP))
        base = _best(run, schedule=("interleaved",), tp=(8,), pp=(4,), recompute=("none",), variant=(PLAIN,))
        pure = {"tp": (1,), "pp": (32,), "micro_batch": (1,)}
        setup = f"{name} at {sequence // 1024}k"
        rows += [
            _against(base, f"{setup}: TP8 x PP4 interleaved", base),
            _against(base, f"{setup}: PP32, best without offload", _best(run, **pure, variant=(PLAIN,))),
        ]
        if OFFLOAD not in known:
            rows.append(Row(f"{setup}: PP32, offload", None, None, None, None, "no offload in this version"))
            continue
        for gib in HOST_MEMORY:
            room = replace(cheap, cluster=replace(cheap.cluster, host_memory_gib=gib))
            offload = _best(
                room, **pure, schedule=("gis", "gis-h"), chunks=(2,), recompute=("selective",), variant=(OFFLOAD,)
            )
            rows.append(_against(base, f"{setup}: PP32, offload, {gib / 1024:g} TiB a node", offload))
        rows.append(_ceiling(base, f"{setup}: PP32, no order is faster", cheap))
    return {f"arXiv 2503.01328, figure 11: 32 devices, batch 256 (PO-F or PO-H is {OFFLOAD_GAIN}): MFU %": rows}


def _against(base: Answer, setup: str, answer: Answer) -> Row:
    if not answer.plans:
        return Row(setup, None, None, None, None, _cut(answer))
    reached = answer.plans[0].mfu
    return Row(setup, None, 100 * reached, None, reached / base.plans[0].mfu if base.plans else None, _cut(answer))


def _ceiling(base: Answer, setup: str, run: Run) -> Row:
    """Return the MFU at the lower bound of two chunks per device, within unlimited memory."""
    pure = replace(run, parallelism=Parallelism(pp=32, global_batch=run.parallelism.global_batch))
    step = price(pure, Placement.interleaved(32, 2))
    reached = mfu(pure, lower_bound(step.placement, pure.parallelism.microbatches, step.costs) + step.outside_seconds)
    uneven = max(step.work_seconds) * len(step.work_seconds) / sum(step.work_seconds) - 1
    note = f"the fullest device computes {100 * uneven:.1f} % more than the mean"
    return Row(setup, None, 100 * reached, None, reached / base.plans[0].mfu if base.plans else None, note)


def vocabulary() -> dict[str, list[Row]]:
    """Compare, for 1F1B in pure pipelines, a head on the last stage, layers moved away from it, and a cut head."""
    known = {variant.name: variant for variant in variants()}
    tables = {}
    for (name, devices, sequence), methods in _told([*VOCABULARY.items()], "vocabulary"):
        rows = []
        base = 0.0
        for method, paper in methods.items():
            for size, measured in zip(VOCABULARIES, paper, strict=True):
                model = replace(load(name, Model), sequence=sequence, vocabulary=size)
                cut = Parallelism(pp=devices, global_batch=VOCABULARY_MICROBATCHES)
                run = Run(model, machine(devices), cut)
                setup = f"{method}, {size // 1024}k"
                if method.startswith("vocabulary-") and method not in known:
                    rows.append(Row(setup, measured, None, None, None, "no such variant in this version"))
                    continue
                answer, ours = _vocabulary(run, method, known)
                base = answer if method == "baseline" and size == VOCABULARIES[0] else base
                relative = measured / methods["baseline"][0]
                note = "" if ours is None else f"our order {ours / base:.3f}"
                rows.append(Row(setup, measured, 100 * answer, relative, answer / base, note))
        tables[f"arXiv 2411.05288, table 5: {name} on {devices} devices, sequence {sequence}, 1F1B: MFU %"] = rows
    return tables


def _vocabulary(run: Run, method: str, known: dict) -> tuple[float, float | None]:
    """Return the MFU of a method and, if it cuts the vocabulary, the MFU of this package's order with the same costs.

    The first is that of the paper's order (``published.vocabulary_1f1b``).
    """
    cut = run.parallelism
    schedule = build_schedule("1f1b", num_devices=cut.pp, num_microbatches=cut.microbatches)
    if method not in known:
        step = price(run, schedule.placement, layout.uncut(run.model, cut.pp) if method == "baseline" else None)
        return mfu(run, simulate(schedule, step.costs).makespan + step.outside_seconds), None
    step = run_step(replace(run, schedule=known[method].choice(run.schedule)), schedule.placement)
    step = replace(step, costs=_with_collectives_of_paper(step.costs, run))
    ours = known[method].apply(schedule, step, step.room(run.cluster.memory_bytes))
    makespans = _published_seconds(ours, step.costs), simulate(ours, step.costs).makespan
    published, own = (mfu(run, makespan + step.outside_seconds) for makespan in makespans)
    return published, own


def _published_seconds(schedule: Schedule, costs: Costs) -> float:
    """Return the seconds of a step in the order of the paper's code, with the passes and barriers of a schedule."""
    vocabulary = costs.vocabulary
    assert vocabulary is not None and isinstance(vocabulary.collectives, Mapping)
    layers, collectives = costs.seconds(schedule.placement), vocabulary.collectives
    backward = tuple(map(add, layers[Kind.I], layers[Kind.W]))
    return step_seconds(
        {**layers, Kind.B: backward, **vocabulary.seconds(schedule.num_devices)},
        {**collectives, Kind.REDUCE_X: collectives[Kind.STATS] + collectives[Kind.REDUCE_X]},
        costs.link_seconds,
        schedule.num_microbatches,
        schedule.vocabulary_barriers,
    )


def _with_collectives_of_paper(costs: Costs, run: Run) -> Costs:
    """Return the costs with the collectives of the paper's code (``vocab_parallel_schedule.py``) in place of this package's.

    It broadcasts the head's input in fp32, together with the loss gradients of the microbatch before. It sums by
    all-reduces, which pass the ring twice, and has one of them for each of three statistics. An all-reduce of one number
    precedes the two collectives of the embedding.
    """
    vocabulary = costs.vocabulary
    assert vocabulary is not None and isinstance(vocabulary.collectives, Mapping)
    seconds, latency = vocabulary.collectives, 1e-6 * run.cluster.ring(run.parallelism.pp).latency_us
    collectives = {
        **seconds,
        Kind.BCAST_X: 2 * seconds[Kind.BCAST_X] - latency,
        Kind.BCAST_G: 0.0,
        Kind.REDUCE_X: 2 * seconds[Kind.REDUCE_X],
        Kind.REDUCE_E: 2 * (seconds[Kind.REDUCE_E] + latency),
        Kind.BCAST_E: seconds[Kind.BCAST_E] + 2 * latency,
        Kind.STATS: 3 * 2 * seconds[Kind.STATS],
    }
    return replace(costs, vocabulary=replace(vocabulary, collectives=collectives))


def _best(run: Run, **allowed: Iterable[object]) -> Answer:
    """Return at most one plan, with the reasons of rejections."""
    limits = Limits({key: tuple(values) for key, values in allowed.items()})
    return plan(run, limits=limits, top=1, search_seconds=0)


def _cut(answer: Answer) -> str:
    if not answer.plans:
        return "nothing fits: " + "; ".join(f"{reason} ({count})" for reason, count in answer.rejected.most_common())
    best = answer.plans[0]
    cut = best.run.parallelism
    text = f"{best.schedule}, TP{cut.tp} PP{cut.pp} DP{cut.dp}, microbatch {cut.micro_batch}"
    return f"{text}{'' if cut.chunks is None else f', v={cut.chunks}'}, {best.peak / GIB:.0f} GiB"


def table(title: str, rows: Sequence[Row]) -> Table:
    caption = (
        "paper, planner: measured, predicted; / base: against the baseline of the setup; off: planner's against paper's"
    )
    result = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
    )
    for column in ("setup", "paper", "planner", "paper / base", "planner / base", "off", "note"):
        result.add_column(column, justify="left" if column in ("setup", "note") else "right")
    for row in rows:
        paper, planner = ratios = (row.relative_paper, row.relative_planner)
        result.add_row(
            row.setup,
            *("" if value is None else f"{value:.2f}" for value in (row.paper, row.planner)),
            *("" if value is None else f"{value:.3f}" for value in ratios),
            "" if paper is None or planner is None else f"{100 * (planner / paper - 1):+.1f}%",
            row.note,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("grid", "offload", "vocabulary"), help="compare only one of the papers")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/papers.json"))
    arguments = parser.parse_args()
    console = Console(width=150, highlight=False)
    results: dict[str, list[dict]] = {}
    for name, compare in (("grid", grid_search), ("offload", offloaded), ("vocabulary", vocabulary)):
        if arguments.only in (None, name):
            with showing(name):
                tables = compare()
            for title, rows in tables.items():
                console.print(table(title, rows))
            console.print(f"Where they differ: {MISSES[name]}\n")
            results |= {title: [asdict(row) for row in rows] for title, rows in tables.items()}
    write_whole(arguments.output, json.dumps(results, indent=1) + "\n")
    console.print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
