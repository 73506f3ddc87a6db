"""``pipemem advise``: compare the schedule of an existing run with other schedules.

The run is given as a launch script, a command line, a run file or a recipe of Megatron-Bridge.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from megatron_pipemem.errors import ConfigError, readable
from megatron_pipemem.files import write_whole
from megatron_pipemem.flags import words, words_by_flag
from megatron_pipemem.model.cut_flags import RESHARDABLE, is_given, saves_optimizer_by_rank, upstream_faults
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.advise.advice import AS_FAST, CUT, ROOM, SAME_MEMORY, WORTH_A_ROW, Advice, Way
from megatron_pipemem.tools.advise.consumers import BRIDGE, MEGATRON, call, changes
from megatron_pipemem.tools.advise.patch import patch
from megatron_pipemem.tools.advise.programs import (
    PREFIX,
    SOURCES,
    is_settings,
    read_program,
    read_recipe,
    read_settings,
)
from megatron_pipemem.tools.advise.reading import Context, Reading, named_cluster
from megatron_pipemem.tools.advise.shell import command_of_words, training_command
from megatron_pipemem.tools.cli.common import Shown, print_answer
from megatron_pipemem.tools.cli.options import Json, check_output
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER, GIB, Cluster
from megatron_pipemem.tools.config.loading import load, read_raw, settings_of, write_yaml
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.megatron.known_flags import known_flags
from megatron_pipemem.tools.planner.explanation import measured_slowdown_of
from megatron_pipemem.tools.planner.slices import doubt_of
from megatron_pipemem.tools.planner.ways import gibibytes, gibibytes_more
from megatron_pipemem.tools.report.terminal import FittingTable


def advise_command(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT.sh | FILE.yaml [KEY=VALUE ...] | bridge:RECIPE [KEY=VALUE ...] | -- COMMAND",
            help="; ".join(f"{form}: {meaning}" for form, meaning in SOURCES.items()) + ".",
        ),
    ],
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A shell variable of the script. Repeatable.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of devices of the run, if the script does not give it.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Cluster whose device speed and memory the comparison assumes; by default that whose device the script "
            f"or recipe names, else {DEFAULT_CLUSTER}.",
        ),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens in the vocabulary, if the script does not give their number.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Images in a sequence, for a model with a vision tower.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            "--costs",
            metavar="FILE",
            help="Measured prices: of `pipemem profile` for this model, or a report of this run.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Write the run, as it stands, as a run file.")
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print the answer as a patch of the script, for `patch -p0` or `git apply`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare a run's schedule with others, and print the line that changes it.

    Parallel sizes and microbatches stay as they are. To change them too, use `pipemem plan`. bash
    evaluates a script in a process that can start, write and reach nothing.

    Examples:
        # a launch script, its arguments, and variables that it takes from outside
        pipemem advise train.sh 8b 4 --env NNODES=4
        # the answer as a patch of the script, for patch -p0
        pipemem advise train.sh --diff
        # a command line
        pipemem advise -- torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 ...
        # a recipe of the installed Megatron-Bridge, or your own as bridge:package.module:function
        pipemem advise bridge:llama3_70b_sft overrides.yaml model.pipeline_model_parallel_size=8
        # settings of NeMo-RL or verl, with overrides
        pipemem advise examples/configs/grpo_math_8B_megatron.yaml cluster.num_nodes=2
        # a run file, with prices that were measured
        pipemem advise configs/runs/llama3-70b-64xh100.yaml --profile profile.json
    """
    check_output(write, (".yaml", ".yml"), "a run")
    with readable(f"the run of {source[0]}"):
        reading = _read(source, _variables(env or ()), cluster, gpus, vocabulary, images)
    slowdown = None if profile is None else measured_slowdown_of(profile, reading.run)
    advice = reading.consumer.advise(reading.run, slowdown)
    if write is not None:
        write_whole(write, write_yaml(settings_of(reading.run)))
    if diff:
        typer.echo(_patch(source, _variables(env or ()), reading, advice), nl=False)
    else:
        print_answer(_facts(reading, advice), _shown(reading, advice, profile is not None), as_json)


def _patch(source: list[str], variables: dict[str, str], reading: Reading, advice: Advice) -> str:
    """Return the answer as a unified diff of the script."""
    path, way = Path(source[0]), advice.best
    is_script = _is_script(path, alone=len(source) == 1) and path.suffix not in (".yaml", ".yml")
    if not is_script or reading.consumer is not MEGATRON:
        raise ConfigError(
            "no-patch",
            f"{source[0]} is not a launch script of Megatron; leave --diff out, and copy the line that the answer prints",
        )
    if way is None:
        raise ConfigError("no-patch", "the answer is to stay, or to change what cannot start; leave --diff out")

    def words_of(text: str) -> list[str]:
        return training_command(text, variables, path.parent, source[1:], str(path)).words

    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    line = changes(reading.consumer, reading.run, way, reading.flags)
    return patch(str(path), text, words_of(text), line, advice.today.is_stock and not way.is_stock, words_of)


def advise_words(words: list[str], devices: int | None) -> None:
    """Print the advice for a command line ``words``: a training script and its flags, on ``devices`` devices.

    ``devices`` is ``None`` if the command gives the number.
    """
    with readable("the command"):
        reading = read_program(words, Context(known_flags(), load(DEFAULT_CLUSTER, Cluster), devices))
    advice = reading.consumer.advise(reading.run)
    print_answer(None, _shown(reading, advice, measured=False), as_json=False)


def advise_measured(source: list[str], report: Path) -> tuple[list[Shown], dict[str, Any]]:
    """Return the advice for a run at the measured seconds of its report, as printed parts and as a JSON object.

    ``source`` has the words that ``pipemem advise`` takes, without options.
    """
    with readable(f"the run of {source[0]}"):
        reading = _read(source, {}, None, None, None, None)
    advice = reading.consumer.advise(reading.run, measured_slowdown_of(report, reading.run))
    return [*_shown(reading, advice, measured=True)], _facts(reading, advice)


def _read(
    source: list[str],
    variables: dict[str, str],
    cluster: str | None,
    gpus: int | None,
    vocabulary: int | None,
    images: int | None,
) -> Reading:
    path = Path(source[0])
    is_yaml = path.suffix in (".yaml", ".yml")
    if is_yaml and not (path.is_file() and is_settings(read_raw(path))):
        run = load(path, Run, source[1:])
        return Reading(run, run.script or "pretrain_gpt.py", ())
    named = None
    if cluster is None:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        named = named_cluster(" ".join([*source, text]))
    context = Context(
        known_flags(), load(cluster or named or DEFAULT_CLUSTER, Cluster), gpus, vocabulary, images, source[0]
    )
    reading = _read_on(context, source, path, variables)
    if named is None:
        return reading
    return replace(
        reading, assumed=(*reading.assumed, f"the devices of {named}, by a name in {source[0]}; --cluster changes them")
    )


def _read_on(context: Context, source: list[str], path: Path, variables: dict[str, str]) -> Reading:
    """Return the run of a script, a command, settings or a recipe."""
    if path.suffix in (".yaml", ".yml"):
        return read_settings(path, source[1:], context)
    if source[0].startswith(PREFIX):
        return read_recipe(source[0].removeprefix(PREFIX), context, source[1:])
    if len(source) == 1 and not path.is_file():
        raise ConfigError("no-file", f"there is no file {path}; give a launch script, a run file, or -- and a command")
    if not _is_script(path, alone=len(source) == 1):
        command, overrides = command_of_words(source, variables), []
    else:
        text, arguments = path.read_text(encoding="utf-8", errors="replace"), source[1:]
        command = training_command(text, variables, path.parent, arguments, str(path))
        # A script that ignores its arguments may start a program with overrides of Hydra.
        overrides = [word for word in arguments if "=" in word and word not in command.words]
    try:
        reading = read_program([*command.words, *overrides], context)
    except ConfigError as error:
        own = error if command.script is None else command.script.with_remedies(error)
        if own.code != "unknown-size" or not command.not_read:
            raise own from error
        message = f"{own.message}; {'; '.join(command.not_read)}"
        raise ConfigError(own.code, message, key=own.key, file=own.file) from error
    return replace(reading, not_read=(*command.not_read, *reading.not_read))


def _is_script(path: Path, alone: bool) -> bool:
    """Return whether a file is a shell script. ``alone`` is whether no words follow it, as they follow a program."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(200)
    return alone or path.suffix in (".sh", ".bash", ".sbatch", ".slurm") or (first[:2] == b"#!" and b"sh" in first)


def _variables(texts: list[str] | tuple[()]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise ConfigError("bad-syntax", f"--env {shortened(name)}: write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _shown(reading: Reading, advice: Advice, measured: bool) -> Iterator[Shown]:
    """Yield the printed answer: the advice with the flags to copy, the compared rows, and the facts that led to it.

    ``measured`` is whether the user gave measured prices.
    """
    sentence, way = _answer(reading, advice)
    yield [("answer", _misfit(reading, advice) + sentence)]
    yield from [] if way is None else map(Text, _words_to_copy(reading, way))
    rows = {"today": advice.today}
    if advice.stock is not None and advice.stock.gain(advice.today) >= WORTH_A_ROW:
        rows["tuned stock"] = advice.stock
    if advice.needless is not None:
        rows["no recompute"] = advice.needless
    rows |= advice.proposals
    yield _table(rows)
    where = f"{reading.consumer.where}: " if reading.consumer.where is not None else ""
    others = {kind: other for kind, other in rows.items() if other is not way and other is not advice.today}
    if others:
        yield "to take another row, add:"
    for kind, other in others.items():
        yield Text(f"  {kind}: {where if call(other) is not None else ''}{_addition(reading, other)}")
    yield ""
    yield _facts_of_run(reading, advice, measured)


def _words_to_copy(reading: Reading, way: Way) -> Iterator[str]:
    """Yield each statement, and the flags, that make the run use ``way``, as a line; then the flags to leave out."""
    added, gone = changes(reading.consumer, reading.run, way, reading.flags)
    replaced = {
        flag: reading.flags[flag]
        for flag in (word.removeprefix("--") for word in words_by_flag(added))
        if reading.consumer.setting is None and is_given(reading.flags, flag)
    }
    gone += words(replaced)
    where, enabled = reading.consumer.where, call(way)
    yield from [enabled] if where is not None and enabled is not None else []
    yield from added if reading.consumer is BRIDGE else [shlex.join(added)] if added else []
    if gone:
        yield f"leave out: {shlex.join(gone)}"


def _table(rows: Mapping[str, Way]) -> FittingTable:
    """Return the table of the compared ways, by the names of their rows."""
    today, tuned = rows["today"], rows.get("tuned stock")
    table = FittingTable(
        ("row", "schedule", "s/step", "vs today", "vs tuned", "idle", "GiB", "messages"),
        text=("row", "schedule"),
        caption="; ".join(_legend(rows)),
    )
    for kind, way in rows.items():
        sent = way.messages / today.messages
        table.add_row(
            kind,
            _name(way),
            f"{way.seconds:.3g}",
            "" if way is today else f"{-way.gain(today):+.1%}",
            "" if tuned is None or way is tuned or way is today else f"{-way.gain(tuned):+.1%}",
            f"{way.idle_rate:.1%}",
            gibibytes(way.peak),
            f"{sent:.2g}" if sent > 1 else "",
        )
    return table


def _legend(rows: Mapping[str, Way]) -> Iterator[str]:
    """Yield the meaning of every column, name and mark that the table of ``rows`` has."""
    today = rows["today"]
    if len(rows) > 1:
        yield (
            "vs today, vs tuned: a longer (+) or shorter (-) step than in that row"
            if "tuned stock" in rows
            else ("vs today: a longer (+) or shorter (-) step than today")
        )
    yield "idle: share of a step, mean of the ranks"
    yield "GiB: all memory of the fullest rank"
    if any(way.messages > today.messages for way in rows.values()):
        yield "messages: times today's"
    if any("v=" in way.name for way in rows.values()):
        yield "v: chunks per rank"
    if any(kind.startswith("same memory") for kind in rows):
        yield f"same memory: at most {SAME_MEMORY:.0%} more than today's"
    if any(way.has_earlier_weights for way in rows.values()):
        yield "W earlier: so that no rank holds more than 1F1B's fullest, or as little as this order can"


def _name(way: Way) -> str:
    length = "" if way.units.are_whole else f" of {min(way.tokens):,} tokens"
    cut = way.variant_text if way.variant.startswith("vocabulary") else ""
    return f"{way.name}{length}{cut}{', W earlier' * way.has_earlier_weights}"


def _facts_of_run(reading: Reading, advice: Advice, measured: bool) -> list[tuple[str, str]]:
    """Return facts about the run and its prices, as pairs of a name and a text."""
    run = reading.run
    cut, model, cluster = run.parallelism, run.model, run.cluster
    sizes = ", ".join(
        f"{name} {getattr(cut, name)}" for name in ("tp", "pp", "dp", "cp", "ep") if getattr(cut, name) > 1
    )
    batch = f"{cut.microbatches} microbatches of {cut.micro_batch} x {model.sequence:,} tokens"
    reserved = f" ({cluster.reserved_gib:g} GiB of it reserved)" if cluster.reserved_gib else ""
    device = f"devices of {cluster.tflops:g} TFLOP/s and {cluster.memory_gib:g} GiB{reserved}"
    prices = "by measured prices" if measured else f"computed for {device}"
    texts = {
        "why this row": _preferred(advice),
        "fails": advice.fails
        and f"{advice.fails}, so Megatron stops at the start; to start it: {_addition(reading, advice.today)}",
        "too large": advice.excess and f"{_of_device(reading, advice.today)}: compared without that limit",
        "no slices": advice.why_whole,
        "host": advice.bound_by_host,
        "in doubt": doubt_of([run, *(way.run for way in advice.proposals.values())]),
        "one queue": advice.one_queue,
        "losses": CUT in advice.proposals and "a cut vocabulary changes them by about 1e-6",
    }
    return [
        ("the run", f"{model.layers} layers of {model.hidden:,} channels, {sizes}; {batch}; {run.precision}"),
        *[("assumed", sentence) for sentence in reading.assumed],
        *[("not read", sentence) for sentence in reading.not_read],
        *[("refused", f"{', '.join(names)}: {message}") for message, names in advice.refused.values()],
        *[(kind, text) for kind, text in texts.items() if text],
        *[("Megatron's fault", sentence) for sentence in upstream_faults(reading.flags)],
        *([("checkpoints", _MOVING)] if _moves_state(reading, advice) else []),
        ("how sure", f"seconds are {prices}; schedules are proved on CPU ranks, none was timed on several GPUs"),
    ]


_MOVING = (
    f"another placement cannot load your optimizer's state; run once as you are with --{RESHARDABLE}, save, and change the "
    "schedule then (docs/moving-a-job.md)"
)


def _moves_state(reading: Reading, advice: Advice) -> bool:
    """Return whether a proposal has stages on other ranks, and the run's checkpoints fit its own placement only."""
    shown = [way for way in (advice.best, *advice.proposals.values()) if way is not None]
    devices = advice.today.step.placement.devices
    keeps = any(is_given(reading.flags, flag) for flag in ("save", "load"))
    moves = any(way.step.placement.devices != devices for way in shown)
    return keeps and moves and saves_optimizer_by_rank(reading.flags)


def _addition(reading: Reading, way: Way) -> str:
    """Return the words that make the run use ``way`` as one text, statements first."""
    return "; ".join(_words_to_copy(reading, way)) or "nothing more"


def _answer(reading: Reading, advice: Advice) -> tuple[str, Way | None]:
    """Return the advice in words, and the way whose flags follow; ``None`` if the run should stay as it is."""
    today, best, where = advice.today, advice.best, reading.consumer.where
    if advice.verdict == "overlap":
        return (
            "stay as you are: your overlap of messages within layers saves more time than another schedule would",
            None,
        )
    if best is None:
        if advice.fails is not None:
            return "only make it start; add:", today
        least = f"no schedule that leaves {ROOM:.0%} of a device's memory free is {AS_FAST:.0%} faster"
        return f"stay as you are: {least}{', and none makes it fit' * (advice.excess > 0)}", None
    reason = _reason(best, advice)
    if best.is_stock or where is not None:
        advised = {"layout": "only change the layout", "recompute": "only leave out the recomputation"}.get(
            advice.verdict,
            f"use Megatron's own schedule {best.name.removeprefix('stock ')}" if best.is_stock else where,
        )
        added = changes(reading.consumer, reading.run, best, reading.flags)[0]
        if not best.is_stock:
            rest = "; put the other lines there too" if reading.consumer is BRIDGE else "; add the rest to the command"
            return f"{reason}: put the next line {advised}{rest if added else ''}:", best
        return f"{reason}: {advised}{'; add' if added else ''}:", best
    start = f"put -m megatron_pipemem run before {Path(reading.program).name}, and " if today.is_stock else ""
    return f"{reason}: {start}add:", best


def _misfit(reading: Reading, advice: Advice) -> str:
    """Return the beginning of the answer for a run that does not start or fit as it is; empty if it does both."""
    starts = (
        "" if advice.fails is None else 'Megatron stops at the run as it is; today is the run that starts ("fails"): '
    )
    if not advice.excess:
        return starts
    ways = (advice.stock, advice.needless, *advice.proposals.values())
    fits = any(way is not None and way.peak <= reading.run.cluster.memory_bytes for way in ways)
    others = (
        ", and no row below fits either (advise --write RUN.yaml, then plan RUN.yaml, ranks other parallel sizes); if it runs "
        "all the same, "
    )
    return f"{starts}does not fit by these prices: {_of_device(reading, advice.today)}{'; ' if fits else others}"


def _of_device(reading: Reading, today: Way) -> str:
    return f"today's run takes {gibibytes(today.peak)} GiB, a device has {reading.run.cluster.memory_bytes / GIB:.1f}"


def _reason(best: Way, advice: Advice) -> str:
    """Return the gain and the memory of the answer ``best``, and why it is not another row."""
    today, gain = advice.today, best.gain(advice.today)
    more = float(gibibytes_more(best.peak, today.peak))
    memory = "in today's memory" if more == 0 else f"in {abs(more):g} GiB {'more' if more > 0 else 'less'} memory"
    if gain < AS_FAST and best is not advice.stock:
        return f"as fast as today, {memory}"
    step = f"a step {abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'} than today's, {memory}"
    if advice.excess and best.peak <= today.peak - advice.excess:
        return f"the fastest that fits: {step}"
    if advice.verdict == "pairs":
        return f"{step}, as pairs hide the travel of experts' tokens"
    return step


def _preferred(advice: Advice) -> str | None:
    """Return why the answer is not the fastest row; ``None`` if it is, or if the run does not fit."""
    best = advice.best
    if best is None or advice.excess:
        return None
    faster = [f'"{kind}"' for kind, way in advice.proposals.items() if way.seconds < best.seconds]
    return (
        f"{', '.join(faster)} would save less than {AS_FAST:.0%} more of today's step, and change more"
        if faster
        else None
    )


def _facts(reading: Reading, advice: Advice) -> dict[str, Any]:
    needless = {} if advice.needless is None else {"no recompute": advice.needless}
    ways = {"today": advice.today, "stock": advice.stock, **needless, **advice.proposals}
    return {
        "run": settings_of(reading.run),
        "program": reading.program,
        "assumed": list(reading.assumed),
        "not_read": list(reading.not_read),
        "answer": advice.verdict,
        "best": next((kind for kind, way in ways.items() if way is not None and way is advice.best), None),
        "fails": advice.fails,
        "unsliced": advice.why_whole,
        "one_queue": advice.one_queue,
        "bound_by_host": advice.bound_by_host,
        "excess_bytes": advice.excess,
        "ways": {kind: way and _way_facts(way, reading, advice) for kind, way in ways.items()},
        "refused": {
            code: {"message": message, "schedules": names} for code, (message, names) in advice.refused.items()
        },
    }


def _way_facts(way: Way, reading: Reading, advice: Advice) -> dict[str, Any]:
    added, gone = changes(reading.consumer, reading.run, way, reading.flags)
    return {
        "schedule": way.order.name,
        "chunks": way.step.placement.num_chunks,
        "slices": way.units.parts,
        "stock": way.is_stock,
        "layers": list(way.step.layers),
        "seconds": way.seconds,
        "gain": way.gain(advice.today),
        "gain_on_stock": None if advice.stock is None else way.gain(advice.stock),
        "bubble_rate": way.bubble_rate,
        "idle_rate": way.idle_rate,
        "peak_bytes": list(way.peak_bytes),
        "messages": way.messages,
        "call": None if reading.consumer.where is None else call(way),
        "add": added,
        "remove": gone,
    }
