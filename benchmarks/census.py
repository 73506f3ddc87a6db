"""Ask ``pipemem advise`` about every recipe of the installed Megatron-Bridge that has a pipeline.

Claim: most recipes run plain 1F1B, and a schedule of this package makes their step shorter in the same memory.
Seconds and bytes are the planner's prices on H100 80 GiB, also for recipes of other devices. Recipes with the same cut,
batch and model have one row. A recipe counts as refused with its reason: its model has parts without a price, its sizes
are on Hugging Face and no network is there, or Megatron refuses its own sizes. A recipe that needs more than its devices
have, by these prices, is compared without that limit.

    python benchmarks/census.py [--markdown] [--output census.json]
    python benchmarks/census.py --benchmarks

The second form counts NVIDIA's benchmark recipes (``megatron.bridge.perf_recipes``) whose settings our schedules accept.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from megatron_pipemem.errors import PipememError
from megatron_pipemem.files import write_whole
from megatron_pipemem.gates import GateQuestion, gates
from megatron_pipemem.refusals import GATHERED_KEYS
from megatron_pipemem.request import Request
from megatron_pipemem.tools.advise.advice import AS_FAST, Advice
from megatron_pipemem.tools.advise.programs import evaluate, run_of
from megatron_pipemem.tools.advise.reading import Context
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load, unpriced_part
from megatron_pipemem.tools.megatron.known_flags import known_flags
from megatron_pipemem.tools.report.terminal import FittingTable

CAPTION = (
    "idle: mean of the ranks; in the same memory: our fastest; stock tuned: Megatron's own with other chunks or layers, where "
    "devices have room; step: against today's"
)
COLUMNS = ("recipe", "p, m", "today", "idle", "in the same memory", "step", "stock tuned", "step")
_RANKS = "pipeline_model_parallel_size"
LARGE_GAIN = 0.05
"""Part of a step from which a gain is counted as large."""
LISTED_GAIN = 0.15
"""Part of a step from which the documents list a recipe."""

SCHEDULES = ("1f1b", "interleaved", "1f1b-v", "zb-h1", "v-half", "seq1f1b")
ACCEPTING = (*((schedule, {}) for schedule in SCHEDULES), ("seq1f1b", {"cp_comm_type": GATHERED_KEYS}))
"""Schedules of which the second form counts the recipes, each with its changes of their settings."""

VARIANTS = {"Qwen/Qwen3-Next": "gated_delta_net", "zai-org/GLM-5": "dsa"}
"""Attention of models whose settings are on Hugging Face alone, by the beginning of the model's name."""


def recipes() -> Iterator[dict[str, Any]]:
    """Yield the recipes with a pipeline, evaluated, each once, and those that raise an error."""
    (listed,) = evaluate(["none"])
    own = [name for name in listed["names"] if "gpu" in name and "_1gpu_" not in name]
    for facts in evaluate(own):
        if _has_pipeline(facts["asked"]) if "error" in facts else facts["values"].get(_RANKS, 1) > 1:
            yield facts


def _has_pipeline(recipe: str) -> bool:
    """Return whether the file of a recipe that cannot be evaluated sets more than one pipeline rank."""
    texts = (file.read_text() for file in sorted((_bridge() / "recipes").rglob("*.py")))
    said = next(text for text in texts if f"def {recipe}(" in text)
    return any(int(ranks) > 1 for ranks in re.findall(rf"{_RANKS} = (\d+)", said))


def _bridge() -> Path:
    bridge = find_spec("megatron.bridge")
    return Path(bridge.submodule_search_locations[0]) if bridge and bridge.submodule_search_locations else Path()


def benchmarks() -> Iterator[Mapping[str, Any]]:
    """Yield the settings of the benchmark recipes that have a pipeline and can be evaluated.

    Numbers of experts may be on Hugging Face alone. A recipe with expert-parallel ranks then has one expert per rank here.
    Variants of attention are there, too: ``VARIANTS`` has them.
    """
    folder, names = _bridge(), []
    for file in sorted((folder / "perf_recipes").rglob("*.py")):
        module = ".".join(("megatron.bridge", *file.relative_to(folder).with_suffix("").parts))
        functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
        names += [
            f"{module}:{function.name}"
            for function in functions
            if function.name.endswith("_config") and not function.args.args
        ]
    for facts in evaluate(names):
        if facts.get("values", {}).get(_RANKS, 1) > 1:
            ranks = facts["values"].get("expert_model_parallel_size") or 1
            variants = (kind for name, kind in VARIANTS.items() if (facts["model"] or "").startswith(name))
            of_model = {"experimental_attention_variant": next(variants, None)}
            yield of_model | ({"num_moe_experts": ranks} if ranks > 1 else {}) | facts["values"]


def refusal(settings: Mapping[str, Any], schedule: str) -> str | None:
    """Return the first setting that a schedule refuses; ``None`` if it accepts all."""
    request = Request(schedule, pairs=bool(settings.get("overlap_moe_expert_parallel_comm")))
    request = request.with_graphs(settings.get("cuda_graph_impl"))
    error = next(gates(GateQuestion(request, {"transformer_impl": "transformer_engine", **settings}.get)), None)
    return None if error is None else str(error).split(" ")[0]


def asked(facts: Mapping[str, Any]) -> Advice | PipememError:
    """Return the advice for a recipe, or why there is none. Neither stock nor our schedules run passes in pairs."""
    try:
        reading = run_of(facts, Context(known_flags(), load("h100-80g", Cluster)))
        return replace(reading.consumer, pairs=False).advise(reading.run)
    except PipememError as error:
        return error


def row(name: str, advice: Advice) -> tuple[str, ...]:
    """Return the cells of a recipe."""
    today, cut = advice.today, advice.today.run.parallelism
    same = [way for kind, way in advice.proposals.items() if kind.startswith("same")]
    ours = max(same, key=lambda way: way.gain(today), default=None)
    stock = advice.stock if advice.stock is not None and advice.stock.gain(today) >= AS_FAST else None
    gains = ["-" if way is None else f"{-way.gain(today):+.1%}" for way in (ours, stock)]
    names = ["-" if way is None else way.name.removeprefix("stock ") for way in (ours, stock)]
    size = f"{cut.pp}, {cut.microbatches}"
    return (
        name,
        size,
        today.name.removeprefix("stock "),
        f"{today.idle_rate:.1%}",
        names[0],
        gains[0],
        names[1],
        gains[1],
    )


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """Return the documents' table: the recipes that gain more than ``LISTED_GAIN`` by a schedule, ours or stock's."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, size, today, idle, ours, gain, stock, stock_gain in rows:
        if min(float(ratio.rstrip("%")) if ratio != "-" else 0.0 for ratio in (gain, stock_gain)) < -100 * LISTED_GAIN:
            quoted = [f"`{way}`" if way != "-" else way for way in (today, ours, stock)]
            cells = (name.removesuffix("_h100_bf16"), size, quoted[0], idle, quoted[1], gain, quoted[2], stock_gain)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the documents' table instead")
    parser.add_argument("--benchmarks", action="store_true", help="count the benchmark recipes that schedules accept")
    arguments = parser.parse_args()
    if arguments.benchmarks:
        settings = [*benchmarks()]
        for schedule, changes in ACCEPTING:
            errors = Counter(refusal({**setting, **changes}, schedule) for setting in settings)
            others = ", ".join(f"{name} {count}" for name, count in errors.most_common() if name)
            named = " ".join((schedule, *(f"{name}={value}" for name, value in changes.items())))
            Console().print(f"{named}: {errors[None]} of {len(settings)} accepted; refused: {others}")
        return
    table, refused, gains = FittingTable(COLUMNS, text=COLUMNS[:3], caption=CAPTION), Counter[str](), []
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}
    for facts in recipes():
        answer = asked(facts)
        name = facts["asked"].removesuffix("_config")
        if isinstance(answer, PipememError):
            refused[unpriced_part(facts.get("unknown") or "") or answer.code] += 1
            continue
        cells = row(name, answer)
        rows.setdefault(cells[1:], cells)
        best = [way.gain(answer.today) for kind, way in answer.proposals.items() if kind.startswith("same")]
        gains.append(max(best, default=0.0))
    for cells in rows.values():
        table.add_row(*map(escape, cells))
    out = Console()
    if arguments.markdown:
        out.print(markdown(rows.values()), markup=False, highlight=False, soft_wrap=True)
    else:
        out.print(table)
    out.print(f"not understood: {'; '.join(f'{reason} {count}' for reason, count in refused.most_common())}")
    out.print(f"{len(gains)} of {len(gains) + sum(refused.values())} recipes with a pipeline are understood")
    out.print(f"{sum(gain > LARGE_GAIN for gain in gains)} gain more than {LARGE_GAIN:.0%} in the same memory")
    if arguments.output is not None:
        write_whole(arguments.output, json.dumps({"rows": list(rows.values()), "refused": refused, "gains": gains}))


if __name__ == "__main__":
    main()
