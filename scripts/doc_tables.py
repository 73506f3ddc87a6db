"""Write the generated tables of the documents.

python scripts/doc_tables.py [--quickstart out/quickstart]

They are: bubbles in the README, schedules under two cost vectors, schedules for research, sequence slices, flags, sources of
runs, codes of errors, refused combinations, the price of one hardware queue, pairs, CUDA graphs, what runs with each
class of models, rooms of the package, and the quickstart's last run. Without ``--quickstart`` the quickstart's table
stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import quickstart
import yaml
from rich.console import Console

from megatron_pipemem import refusals
from megatron_pipemem.conflicts import CONFLICTS
from megatron_pipemem.errors import CODES
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.files import write_whole
from megatron_pipemem.flags import flag_parser
from megatron_pipemem.gates import GateQuestion, gates
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.request import Request, flags_of
from megatron_pipemem.schedule.baseline import share_of_1f1b
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.search import search_schedule
from megatron_pipemem.tools.advise.programs import SOURCES
from megatron_pipemem.tools.cli.schedules import RESEARCH
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load, typed
from megatron_pipemem.tools.planner.profile import from_formulas

DOCS = Path(__file__).resolve().parents[1] / "docs"
PACKAGE = DOCS.parent / "megatron_pipemem"
CLASSES = DOCS.parent / "tests" / "end_to_end" / "classes_of_models.yaml"
DOCUMENTS = {
    "classes": "what-runs-where.md",
    "bubbles": "../README.md",
    "costs": "choosing-a-schedule.md",
    "research": "other-schedules.md",
    "slices": "long-sequences.md",
    "codes": "troubleshooting.md",
    "flags": "start.md",
    "sources": "start.md",
    "conflicts": "refused.md",
    "refusals": "refused.md",
    "queues": "../benchmarks/notes/gpus.md",
    "parts": "how-it-works.md",
    "pairs": "experts.md",
    "graphs": "what-runs-where.md",
    "quickstart": "start.md",
}
"""The document that has each table."""

DEVICES, MICROBATCHES = 8, 32
SIZES = [(4, 8), (4, 16), (8, 16), (8, 32), (16, 16), (16, 32)]
GAINS = {"1f1b": "stock's", "zb-h1": "in about its memory", "v-half": "in 1/2 + 1/p of it"}
"""The schedules in the README's first table, each with text about its memory."""
COSTS = {"1 : 1 : 1": Costs(1, 1, 1), "1 : 1.5 : 0.5": Costs(1, 1.5, 0.5)}
COMPARED: dict[str, tuple[str, dict[str, int]]] = {
    "`1f1b`": ("1f1b", {}),
    "`interleaved`, 2 chunks": ("interleaved", {"chunks": 2}),
    "`interleaved`, 5 chunks": ("interleaved", {"chunks": 5}),
    "`gis`, 5 chunks": ("gis", {"chunks": 5}),
    "`zb-h1`": ("zb-h1", {}),
    "`zbv`": ("zbv", {}),
    "`v-half`": ("v-half", {}),
    "`v-min`": ("v-min", {}),
}
"""The rows of a table: the printed name, with the schedule's name and options."""
SEARCHES = {"`auto`, cap 0.625, two chunks as `v-half`": 2, "`auto`, cap 0.625, up to eight chunks": 8}
CAP = 0.625
SEQUENCE, TENSOR_RANKS = 4096, 8
PEAKS = ("units", "bytes")
WORDS = {
    "stock": "stock's schedule",
    "asynchronous": "`pipedream` and `pipedream-2bw`",
    "updates per microbatch": "`pipedream`",
    "offload": "offload and recomputation",
    "host": "offload",
    "vocabulary": "a cut vocabulary",
    "pieces": "`--pipemem-vocab-piece-tokens`",
    "whole vocabulary": "a whole vocabulary",
    "profile": "`--pipemem-costs profile`",
    "overlap": "`--pipemem-overlap-steps`",
    "weights": "`--pipemem-microbatch-costs`",
    "replicas": "two replicas of the model",
    "single queue": "`--pipemem-single-queue`",
    "period": "the option `period`",
    "searched slices": "several numbers of `slices`",
    "slices": "sequence slices",
    "pairs": "`--overlap-moe-expert-parallel-comm`",
    "layerwise": "`--pipemem-rng layerwise`",
    "graphs": "a CUDA graph per pass",
    "search": "`auto`",
    "recomputation": "recomputation by the schedule",
}
"""Names of features in the documents' list of refused combinations."""
REFUSED_VALUES: dict[str | tuple[str, str], str] = {
    "attention_dropout": "above 0",
    "hidden_dropout": "above 0",
    "clip_grad": "above 0",
    "context_parallel_size": "above 1",
    "cuda_graph_impl": "but `none`",
    ("GRAPHED", "experimental_attention_variant"): "but `gated_delta_net`",
    ("GRAPHED_MODULES", "recompute_modules"): "",
    "fp8_recipe": "but `tensorwise`, `mxfp8`",
    "fp4_recipe": "but `nvfp4`",
    ("GRAPHED_FP4", "recompute_granularity"): "",
    "tensor_model_parallel_size": "above 1",
    ("UNCAPTURED", "cuda_graph_impl"): "`local`, or `transformer_engine` with more than whole backwards",
    ("WHOLE_STEP", "cuda_graph_impl"): "`full_iteration`",
    ("SHARED_SLICES", "cp_comm_type"): "but `all_gather`",
    "cuda_graph_warmup_steps": "0",
    "num_microbatches_with_partial_activation_checkpoints": "if given",
    "moe_router_load_balancing_type": "`quantile_balancing`, `global_aux_loss`",
    ("SLICED", "moe_router_load_balancing_type"): "`quantile_balancing`, `sinkhorn`",
    ("GRAPHED_EXPERTS", "moe_router_load_balancing_type"): "`quantile_balancing`, `sinkhorn`",
    "num_distributed_optimizer_instances": "above 1",
    "moe_token_dispatcher_type": "`flex`",
    "moe_flex_dispatcher_backend": "but `deepep`, `hybridep`",
    "gtp_weight_remat_size": "above 1",
    "expert_gtp_weight_remat_size": "above 1",
    "rerun_mode": "but `disabled`",
    "recompute_granularity": "`full`",
    "recompute_modules": "with `moe`",
    "optimizer": "but `adam`, `sgd`",
    "grad_norm_skip_threshold": "if finite",
}
"""The values of an option that are refused, for the tables of refusals. All true values are, where none are named."""
FLAGS = {
    "The usual ones": ("schedule", "memory-cap", "costs", "report", "layout"),
    "Schedule": (
        "option",
        "schedule-module",
        "plan",
        "overlap-steps",
        "single-queue",
        "rng",
        "slice-cut",
    ),
    "Memory": (
        "offload",
        "offload-option",
        "host-memory",
        "recompute",
        "vocab-cut",
        "vocab-piece-tokens",
        "wgrad-inputs",
        "early-wgrad",
    ),
    "Data and reports": ("microbatch-costs", "message-shapes", "trace"),
}
"""The flags of the documents, by their use."""
EXPLAINED = {
    "When a run starts:": (
        "enabled-too-late",
        "no-launcher",
        "other-version",
        "plan-differs",
        "ranks-differ",
    ),
    "In a step:": (
        "data-iterator",
        "late-gradient",
        "missing-gradient",
        "step-runs-again",
        "changed-while-away",
        "host-memory",
    ),
}
"""The codes of the documents, by the situation in which users meet them. The others say no more than their messages."""
SLICES = (1, 2, 4, 8)
PAIRED = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "dualpipe-v", "dualpipe")
GRAPHS = {"local": "", "transformer_engine": "layers, by Transformer Engine", "full_iteration": "the step, by Megatron"}
"""The values of Megatron's flag for CUDA graphs, with the captured part if it is not every pass."""
TRAVEL = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of F and I in which the tokens of experts travel."""
SLICED = ("seq1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min")


def table_of_costs() -> str:
    rows = {
        what: [_family(name, costs, **options) for costs in COSTS.values()]
        for what, (name, options) in COMPARED.items()
    }
    rows |= {what: [_found(chunks, costs) for costs in COSTS.values()] for what, chunks in SEARCHES.items()}
    lines = [["schedule", *PEAKS, *(f"bubble at F : I : W = {ratio}" for ratio in COSTS)]]
    for name, runs in rows.items():
        peaks = [f"{max(row_peaks):.{digits}f}" for digits, *row_peaks in zip((3, 2), *map(_peaks, runs), strict=True)]
        lines.append([name, *peaks, *(f"{run.bubble_rate:.1%}" for run in runs)])
    return _rows(lines)


@cache
def _memory() -> Costs:
    """Return costs with the bytes of Llama-70B in bf16, for Transformer Engine's layers."""
    model, cluster = replace(load("llama3-70b", Model), sequence=SEQUENCE), load("h100-80g", Cluster)
    cut = {"tp": TENSOR_RANKS, "sequence_parallel": True, "implementation": "transformer_engine"}
    return from_formulas(model, typed(cut, Execution), cluster).costs()


def _peaks(run: Timeline) -> list[float]:
    """Return the peak in activation units, and its share of 1F1B's bytes if the costs determine one.

    W of a family's schedule run earlier as with ``--pipemem-early-wgrad auto``.
    """
    costs, is_family = _memory(), any(run.schedule.name == known.name for known in families())
    share = share_of_1f1b(simulate(with_earlier_weights(run.schedule, costs) if is_family else run.schedule, costs))
    return [run.peak] if share is None else [run.peak, share]


def _rows(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = lines
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)).replace(" --- ", "---")


def _family(name: str, costs: Costs, **options: int) -> Timeline:
    schedule = build_schedule(name, num_devices=DEVICES, num_microbatches=MICROBATCHES, costs=costs, **options)
    return simulate(schedule, costs)


def _found(chunks: int, costs: Costs) -> Timeline:
    result = search_schedule(
        num_devices=DEVICES, num_microbatches=MICROBATCHES, costs=costs, memory_cap=CAP, max_chunks=chunks, seconds=60
    )
    return simulate(result.schedule, costs)


def table_of_bubbles() -> str:
    lines = [["pipeline ranks, microbatches", *(f"{p}, {m}" for p, m in SIZES)]]
    for name, memory in GAINS.items():
        rates = [[_rate(name, p, m, costs) for p, m in SIZES] for costs in COSTS.values()]
        labels = [f"`{name}`, {memory}", f"`{name}`, if W is half of F"]
        lines += [
            [label, *row] for label, row in zip(labels, rates, strict=True) if row != rates[0] or label == labels[0]
        ]
    return _rows(lines)


def _rate(name: str, devices: int, microbatches: int, costs: Costs) -> str:
    schedule = build_schedule(name, num_devices=devices, num_microbatches=microbatches)
    return f"{simulate(schedule, costs).bubble_rate:.1%}"


def table_of_research() -> str:
    lines = [["name", "placement", *PEAKS, "bubble", "messages", "from"]]
    for family in families():
        if family.name not in RESEARCH:
            continue
        run = _family(family.name, Costs())
        units, *in_bytes = _peaks(run)
        peaks = [f"{units:.3f}", *(f"{share:.2f}" for share in in_bytes)]
        source = family.source.split(";")[0]
        bubble = f"{run.bubble_rate:.1%}"
        lines.append([f"`{family.name}`", family.placement, *peaks, bubble, str(run.messages), source])
    return _rows(lines)


def table_of_slices() -> str:
    rows = [
        f"| schedule | {' | '.join(f'{n} slices' if n > 1 else 'whole' for n in SLICES)} |",
        f"|---|{'---|' * len(SLICES)}",
    ]
    for name in SLICED:
        runs = [_family(name, Costs(), slices=n) for n in SLICES]
        rows.append(f"| `{name}` | {' | '.join(f'{run.peak:.3f}, {run.bubble_rate:.1%}' for run in runs)} |")
    return "\n".join(rows)


def table_of_pairs() -> str:
    """Return the makespans without pairs and with them, by the share of F and I in which tokens travel."""
    lines = [["schedule", "peak", "peak with pairs", "without", *(f"{share:.0%}" for share in TRAVEL)]]
    for name in PAIRED:
        plain = _family(name, Costs())
        runs = [with_pairs(plain.schedule, Costs().with_exchanges(share)) for share in TRAVEL]
        peak = max((run.peak for run in runs if run.schedule.pairs), default=None)
        lines.append(
            [f"`{name}`", f"{plain.peak:.4g}", "no pairs" if peak is None else f"{peak:.4g}"]
            + [f"{run.makespan:.4g}" for run in (plain, *runs)]
        )
    return _rows(lines)


def table_of_graphs() -> str:
    """Return a Markdown table of the passes that each value of Megatron's flag for CUDA graphs captures, by schedule."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in families():
        cells = tuple(_captured(Request(family.name), impl) for impl in GRAPHS)
        rows.setdefault(cells, []).append(f"`{family.name}`")
    ordered = sorted(rows.items(), key=lambda row: row[0].count("refused"))
    return _rows([["schedule", *(f"`{impl}`" for impl in GRAPHS)], *([", ".join(n), *cells] for cells, n in ordered)])


def _captured(request: Request, impl: str) -> str:
    request = request.with_graphs(impl)
    if any(gates(GateQuestion(request, {"cuda_graph_impl": impl}.get))):
        return "refused"
    return "every pass, by us" if request.graphs else GRAPHS[impl]


def list_of_queues() -> str:
    """Return, for each family, how much longer its step gets with one hardware queue per rank.

    Both programs of each family are proved first.
    """
    prices, costs = [], Costs(1, 1.5, 0.5, p2p=0.02)
    for family in families():
        schedule = build_schedule(family.name, num_devices=DEVICES, num_microbatches=MICROBATCHES, costs=costs)
        usual, queued = (lower(schedule, single_queue=single_queue, costs=costs) for single_queue in (False, True))
        validate_program(usual)
        validate_program(queued, single_queue=True)
        price = run_single_queues(queued, costs).makespan / simulate(schedule, costs).makespan - 1
        prices.append(f"`{family.name}` {price:.1%}")
    return _filled(", ".join(prices))


_filled = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)


def _items(entries: Iterable[tuple[str, str]]) -> str:
    """Return pairs of a name and a meaning as a Markdown list, with lines of at most 120 columns."""
    return "\n".join(_filled(f"- {name}: {meaning}", subsequent_indent="  ") for name, meaning in entries)


def list_of_codes() -> str:
    """Return Markdown lists of the codes whose errors need more than their message, by situation."""
    lists = (
        f"{situation}\n\n{_items((f'`{code}`', CODES[code]) for code in codes)}"
        for situation, codes in EXPLAINED.items()
    )
    return "\n\n".join(lists)


def list_of_flags() -> str:
    """Return Markdown lists of all flags by their use, the usual ones first."""
    plan = next(action for action in flag_parser()._actions if action.dest == "pipemem_plan")
    entries = {"plan": (f"`--pipemem-plan {plan.metavar}`", plan.help or "")}
    for flag in flags_of(Request).values():
        more = f" ([more]({flag.page}))" if flag.page else ""
        name = flag.name.removeprefix("--pipemem-")
        entries[name] = (f"`{f'{flag.name} {flag.metavar or str()}'.strip()}`", f"{flag.help}{more}")
    lists = [f"**{use}**\n\n{_items(entries.pop(name) for name in names)}" for use, names in FLAGS.items()]
    if entries:
        raise SystemExit(f"FLAGS lacks {', '.join(entries)}")
    return "\n\n".join(lists)


def list_of_conflicts() -> str:
    """Return a Markdown list of the features that exclude each other."""
    return _items(
        (f"{WORDS[one]}, not with", ", ".join(WORDS[other] for other in _outermost(excluded)))
        for one, excluded in CONFLICTS.items()
    )


def _outermost(excluded: Collection[str]) -> list[str]:
    """Return the excluded features without those that ``offload``, which is also recomputation, covers."""
    return [other for other in excluded if "offload" not in excluded or other not in ("host", "recomputation")]


def list_of_refusals() -> str:
    """Return Markdown lists of the values of Megatron's options that each feature refuses, with reason and remedy."""
    parts = []
    for name, table in vars(refusals).items():
        if isinstance(table, refusals.Refusals):
            shared = _shared_remedy(table.sentences.values())
            options: dict[str, list[str]] = {}  # those with one reason share an entry
            for option, sentence in table.sentences.items():
                values = REFUSED_VALUES.get((name, option), REFUSED_VALUES.get(option, ""))
                options.setdefault(_reason(option, sentence, shared), []).append(
                    f"`{option}`{values and f' ({values})'}"
                )
            entries = _items((", ".join(listed), reason) for reason, listed in options.items())
            feature = (table.feature or " with every schedule").strip()
            parts.append(f"**{feature[0].upper()}{feature[1:]}**{f' (or {shared})' if shared else ''}\n\n{entries}")
    return "\n\n".join(parts)


def _shared_remedy(sentences: Collection[str]) -> str:
    """Return the last remedy of several refusals if all of them have the same one, else nothing."""
    last = {sentence.partition("; ")[2].rpartition(", or ")[2] for sentence in sentences}
    return last.pop() if len(last) == 1 < len(sentences) else ""


def _reason(option: str, sentence: str, shared: str) -> str:
    """Return the reason of a refusal, and its remedies other than another value of the option, or than ``shared``."""
    reason, _, remedy = sentence.partition("; ")
    own = re.compile(rf"drop (it|--[\w-]+)$|leave it out$|pass --{option.replace('_', '-')} ")
    remedies = [text for text in remedy.removesuffix(shared).split(", or ") if text and not own.match(text)]
    instead = re.sub(r" in place of --[\w-]+", "", ", or ".join(remedies))
    instead = re.sub("^--", "pass --", instead)
    return f"{reason}. Instead: {instead}." if instead else f"{reason}."


def table_of_classes() -> str:
    """Return a Markdown table of what runs with each of Megatron's classes of models."""
    cells = yaml.safe_load(CLASSES.read_text(encoding="utf-8"))
    classes = [*next(iter(cells.values()))]
    rows = [[feature, *(_mark(row[name][0]) for name in classes)] for feature, row in cells.items()]
    return _rows([["feature", *(f"`{name}`" if name.isidentifier() else name for name in classes)], *rows])


def _mark(result: str) -> str:
    """Return a mark for a test's result, such as ``bits`` or ``refused: CODE``. Other results stay as they are."""
    kind, _, code = result.partition(": ")
    return {"bits": "✓", "close": "≈"}.get(kind, f"✗ `{code}`" if code else f"✗ {result}")


def table_of_parts() -> str:
    """Return a Markdown table of the package's rooms: the first sentence of each folder, those of the core first."""
    lines = [["room", "what it is"]]
    rooms = sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
    for room in sorted(rooms, key=lambda path: path.name == "tools"):
        source = (room / "__init__.py").read_text(encoding="utf-8")
        sentence = (ast.get_docstring(ast.parse(source)) or "").partition(". ")[0]
        lines.append(
            [f"`{room.name}`", " ".join(sentence.partition("\n\n")[0].rstrip(".:").split()).replace("``", "`")]
        )
    return _rows(lines)


def table_of_quickstart(output: Path) -> str:
    """Return the table of the last quickstart run, without title and caption."""
    text, table = io.StringIO(), quickstart.table(json.loads((output / "summary.json").read_text(encoding="utf-8")))
    table.title = table.caption = ""
    Console(file=text, width=100).print(table)
    lines = [line[1:].rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(["```", *(line for line in lines if line), "```"])


def _between(block: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{block}\n{marks[2]}"


def written(text: str, blocks: Mapping[str, str]) -> str:
    """Return the text with the lines between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` replaced.

    ``blocks`` has the new lines by name. Raise a SystemExit if the text does not have exactly one block of a name.
    """
    for name, block in blocks.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, count = mark.subn(partial(_between, block), text)
        if count != 1:
            raise SystemExit(f"the document needs one block <!-- {name} -->, it has {count}")
    return text


BLOCKS: dict[str, Callable[[], str]] = {
    "bubbles": table_of_bubbles,
    "costs": table_of_costs,
    "research": table_of_research,
    "slices": table_of_slices,
    "codes": list_of_codes,
    "flags": list_of_flags,
    "sources": lambda: _items((f"`{form}`", f"{meaning}.") for form, meaning in SOURCES.items()),
    "conflicts": list_of_conflicts,
    "refusals": list_of_refusals,
    "queues": list_of_queues,
    "parts": table_of_parts,
    "classes": table_of_classes,
    "pairs": table_of_pairs,
    "graphs": table_of_graphs,
}
"""The tables that need no run, and the functions that compute them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, metavar="FOLDER", help="what the quickstart wrote")
    arguments = parser.parse_args()
    blocks = {name: block() for name, block in BLOCKS.items()}
    if arguments.quickstart:
        blocks["quickstart"] = table_of_quickstart(arguments.quickstart)
    for name, block in blocks.items():
        document = DOCS / DOCUMENTS[name]
        write_whole(document, written(document.read_text(encoding="utf-8"), {name: block}))


if __name__ == "__main__":
    main()
