"""Convert the words of a Megatron command to a run: model, parallel sizes, schedule, and all other flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.model.arguments import model_of
from megatron_pipemem.model.model import BY_ACTION, Model, Tower
from megatron_pipemem.request import flags_of
from megatron_pipemem.schedule.options import STOCK, parse_options
from megatron_pipemem.tools.advise.consumers import IMAGES, MEGATRON, TOWER, Consumer
from megatron_pipemem.tools.config.arguments import UNKNOWN, Arguments, FlagTable, ask_for
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import RECOMPUTE_FLAG, Parallelism, Run, ScheduleChoice
from megatron_pipemem.values import refuse_if, whole_number

_PER_NODE = ("nproc-per-node", "ntasks-per-node", "gpus-per-node", "actor-num-gpus-per-node")
_NODES = ("nnodes", "nodes", "actor-num-nodes")
_GPUS = "give --gpus N, or --pipemem-check=N"
_GPT2 = 50257
_TYPING_ERROR = 0.9
"""Similarity to a known flag above which an unknown flag counts as mistyped. Others are the program's own."""
_OTHERS = (
    *(
        "mock-data",
        "save",
        "pretrained-checkpoint",
        "exit-signal",
        "exit-signal-handler",
        "pipemem-report",
        "pipemem-trace",
    ),
    *("max-position-embeddings", "recompute-method", "recompute-num-layers"),
)
"""Flags that a run sets itself."""


@dataclass(frozen=True)
class Reading:
    """The run that a command starts, and the assumptions about it.

    Args:
        run: the run that the command starts.
        program: the training program, as the command names it.
        assumed: sentences about facts that the command leaves open.
        consumer: the kind of program.
        not_read: sentences about parts of the script, or flags, that were not read.
    """

    run: Run
    program: str
    assumed: tuple[str, ...]
    consumer: Consumer = MEGATRON
    not_read: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """Facts that a command or recipe may leave open. Numbers are ``None`` if they are not known otherwise."""

    flag_table: FlagTable  # flags of Megatron's parser
    cluster: Cluster  # whose devices are priced; the number of nodes follows from the command
    devices: int | None = None  # of the whole run
    vocabulary: int | None = None  # tokens in the vocabulary
    images: int | None = None  # in a sequence, for a model with a vision tower


def parts(words: Sequence[str]) -> tuple[dict[str, str], str, Sequence[str]]:
    """Return the launcher's options of a command, the program (a script, or a module after ``-m``), and the words after it."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    place = words.index("-m") + 1 if place is None else place
    return _launcher(words[:place]), words[place], words[place + 1 :]


def read_flags(flags: Mapping[str, Any], launcher: Mapping[str, str], program: str, context: Context) -> Reading:
    """Return the run of a program with these flags (``read_command``).

    Args:
        flags: values by flag without dashes; ``True`` for a flag without a value, a list for several values.
        launcher: options of the launcher by name without leading dashes.
        program: the training program or recipe.
        context: facts that the flags may leave open.
    """
    args = Arguments(flags, context.flag_table)
    assumed: list[str] = []
    model = _model(args, flags, assumed, context.vocabulary)
    model = replace(model, tower=_tower(flags, assumed, context.images))
    choice = _schedule(args, flags)
    cut, nodes, per_node = _parallelism(args, flags, launcher, context.devices, context.cluster, assumed)
    if choice.name == STOCK:
        cut = replace(cut, chunks=_chunks(flags, model, cut.pp))
        args.mark(cut_flags.VIRTUAL_STAGES, cut_flags.LAYERS_PER_STAGE)
    if model.experts and cut.tp > 1 and not cut.sequence_parallel:
        cut = replace(cut, sequence_parallel=True)
        assumed.append("--sequence-parallel, without which Megatron trains no experts on tensor-parallel ranks; add it")
    is_single = not (args.bf16 or args.fp16)
    cluster = replace(context.cluster, nodes=nodes, devices_per_node=per_node)
    args.mark(*_OTHERS, "bf16", "fp16", TOWER, IMAGES)
    others = args.unread() | ({"bf16": False} if is_single else {"fp16" if args.fp16 else "bf16": True})
    pattern_flag, pattern = cut_flags.given_pattern(flags)
    if pattern_flag is not None and layout.is_cut(pattern):
        others[pattern_flag] = pattern
    run = Run(model, cluster, cut, choice, others)
    if rank := run.execution.adapters:
        assumed.append(
            f"adapters of rank {rank} on all linear layers; the layers' own weights have no W, so a split backward gains "
            "little"
        )
    return Reading(run, program, tuple(assumed))


def named(words: Sequence[str], flag_table: FlagTable) -> dict[str, Any]:
    """Return the values of a program's flags by name without dashes. Names that look mistyped are refused.

    The value is ``True`` for a flag without a value, and a list for several values. Of flags of this package that may be
    repeated, it is a list with the values of all occurrences.
    """
    flags: dict[str, Any] = {}
    repeated = {flag.name for flag in flags_of(ScheduleChoice).values() if flag.repeated}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("--") or word == "--":
            continue
        word, equals, value = word.partition("=")
        values = [value] if equals else []
        flag = flag_table.get(word)
        may_be_mistyped = flag is None and UNKNOWN not in word
        near = get_close_matches(word, flag_table, n=1, cutoff=_TYPING_ERROR) if may_be_mistyped else []
        if near and not _is_variation(word, near[0]):
            raise ConfigError("unknown-flag", f"Megatron has no such flag; did you mean {near[0]}?", key=word)
        while flag is None or not flag["bare"]:
            if place == len(words) or words[place].startswith("--") or (values and (flag or {}).get("nargs") is None):
                break
            values.append(words[place])
            place += 1
        name = word.lstrip("-")
        if word in repeated:
            flags[name] = [*flags.get(name, []), *values]
        else:
            flags[name] = True if not values else values[0] if len(values) == 1 else values
    return flags


def _is_variation(word: str, flag: str) -> bool:
    """Return whether a flag differs from another one by whole words or a number, which a typing error does not."""
    words, others = (set(name.strip("-0123456789").split("-")) for name in (word, flag))
    return words <= others or others <= words


def _launcher(words: Sequence[str]) -> dict[str, str]:
    """Return the options of the launcher, such as torchrun, by name without leading dashes.

    Underscores in names become dashes, and ``-N`` is ``nodes``.
    """
    options: dict[str, str] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            continue
        value = value if equals else "".join(words[place + 1 : place + 2])
        options[{"-N": "nodes"}.get(name, name.lstrip("-").replace("_", "-"))] = value
    return options


def _whole(text: str | None) -> int | None:
    """Return a launcher's number; for a range of nodes like ``2:4``, the greatest. ``None`` if it is not a number.

    Raises:
        ConfigError: the value depends on a variable that is unknown.
    """
    if UNKNOWN in (text or ""):
        ask_for(str(text), "the launcher")
    match = re.fullmatch(r"(?:\d+:)?(\d+)", text or "")
    return int(match[1]) if match else None


def _parallelism(
    args: Arguments,
    flags: Mapping[str, Any],
    launcher: Mapping[str, str],
    devices: int | None,
    cluster: Cluster,
    assumed: list[str],
) -> tuple[Parallelism, int, int]:
    """Return the parallel sizes, the number of nodes, and the number of devices of each node.

    A sentence is added to ``assumed`` if the command leaves the number of nodes open. Raise a ConfigError if
    the number of devices is unknown or does not fit the parallel sizes.
    """
    tp, pp, cp, ep = (
        _size(args, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    micro = _size(args, "micro_batch_size")
    # With a known number of devices, the launcher's unknown values do not matter.
    launcher = {name: text for name, text in launcher.items() if devices is None or UNKNOWN not in text}
    per_node = next((count for name in _PER_NODE if (count := _whole(launcher.get(name)))), None)
    per_node = per_node or _program_number(flags, args, "actor-num-gpus-per-node")
    nodes = next((count for name in _NODES if (count := _whole(launcher.get(name)))), None)
    nodes = nodes or _program_number(flags, args, "actor-num-nodes")
    group = tp * pp * cp
    unsaid = "the command does not give the number of devices"
    refuse_if(devices is None and per_node is None, "unknown-size", "devices", f"{unsaid}; {_GPUS}")
    devices = devices or (per_node or 1) * (nodes or 1)
    starts, open_nodes = f"the command starts {devices} processes on each node", "does not give the number of nodes"
    some = nodes is None and devices < group and devices % group
    refuse_if(some, "unknown-size", "devices", f"{starts}, and {open_nodes}; {_GPUS}")
    uneven = f"tp x pp x cp = {group} does not divide {devices} devices; {_GPUS}"
    refuse_if(devices % group, "does-not-divide", "devices", uneven)
    dp = devices // group
    if nodes is None:
        assumed.append(f"{devices} devices, so {dp} data-parallel ranks")
    batch = args.global_batch_size or micro * dp
    per_node = min(per_node or cluster.devices_per_node, devices)
    etp = args.expert_tensor_parallel_size
    experts = ep * (etp or tp)
    apart = f"{starts}, which pp = {pp} and ep x etp = {experts} do not divide, and {open_nodes}; {_GPUS}"
    refuse_if(nodes is None and (devices // pp) % experts, "unknown-size", "devices", apart)
    etp = None if etp == tp else etp
    cut = Parallelism(tp, pp, dp, cp, ep, etp, None, micro, batch, bool(args.sequence_parallel))
    return cut, -(-devices // per_node), per_node


def _size(args: Arguments, name: str) -> int:
    """Return a size of at least 1, which is also its default."""
    value = getattr(args, name)
    refuse_if(value is not None and value < 1, "bad-number", _flag(name), f"is {value}; give at least 1")
    return value or 1


def _flag(attribute: str) -> str:
    return f"--{attribute.replace('_', '-')}"


def _program_number(flags: Mapping[str, Any], args: Arguments, name: str) -> int | None:
    """Return the number of a flag that is not Megatron's; ``None`` if it is not given."""
    args.mark(name)
    if UNKNOWN in str(flags.get(name)):
        ask_for(str(flags[name]), f"--{name}")
    return whole_number(flags.get(name), name)


def _chunks(flags: Mapping[str, Any], model: Model, pp: int) -> int | None:
    """Return the number of stages per pipeline rank; ``None`` if it is one."""
    cut = cut_flags.cut_of(flags, pp, model.layers)
    return int(cut.chunks) if cut is not None and cut.chunks > 1 else None


def _schedule(args: Arguments, flags: Mapping[str, Any]) -> ScheduleChoice:
    recompute = args.recompute_granularity or ("selective" if args.recompute_activations else "none")
    modules = args.recompute_modules or ["core_attn"]
    settings: dict[str, Any] = {"recompute": recompute}
    if recompute == "selective":
        settings["recompute_modules"] = tuple([modules] if isinstance(modules, str) else modules)
    if flags.get(RECOMPUTE_FLAG) == "selective":
        settings |= {"recompute": "selective", "recompute_modules": BY_ACTION}
        args.mark(RECOMPUTE_FLAG)
    ours = {key: flag.name.lstrip("-") for key, flag in flags_of(ScheduleChoice).items()} | {"name": "pipemem-schedule"}
    repeated = {key for key, flag in flags_of(ScheduleChoice).items() if flag.repeated}
    for key, name in ours.items():
        args.mark(name)
        if (value := flags.get(name)) is not None:
            settings[key] = parse_options(f"--{name}", value) if key in repeated else value
    return ScheduleChoice(**settings)


def _model(args: Arguments, flags: Mapping[str, Any], assumed: list[str], vocabulary: int | None) -> Model:
    other = (
        "belongs to an encoder-decoder model, which Megatron runs without these schedules; give a GPT or hybrid model"
    )
    for name in ("decoder-num-layers", "decoder-seq-length"):
        refuse_if(name in flags, "unsupported-model", f"--{name}", other)
    size = {} if vocabulary is None else {"vocab_size": vocabulary}
    try:
        model = model_of(args, **size)
    except ConfigError as error:
        key = error.key if error.key is None or error.key.startswith("--") else _flag(error.key)
        raise ConfigError(error.code, error.message, key=key) from error
    if model.experts:
        args.mark("no-bias-swiglu-fusion")
    vocabulary = vocabulary or args.vocab_size or args.padded_vocab_size
    return replace(model, vocabulary=vocabulary or _vocabulary(flags, model, assumed))


def _tower(flags: Mapping[str, Any], assumed: list[str], images: int | None) -> Tower | None:
    """Return the vision tower of the command's model, or ``None``.

    Its number of images is ``images``, the user's, or else that of the command. If both are unknown, a sentence is
    added to ``assumed``.
    """
    tower: Tower | None = flags.get(TOWER)
    if tower is None:
        return None
    sizes = flags.get(IMAGES)
    if sizes is not None:
        count, *sides = sizes
        fixed = tower.projection == 0  # its images are scaled to one size
        patches = tower.patches if fixed else max(1, prod(side // tower.patch for side in sides))
        tower = replace(tower, images=max(1, count), patches=patches)
    if images is not None:
        tower = replace(tower, images=images)
    elif sizes is None:
        assumed.append(f"{tower.images} image of {tower.patches:,} patches in a sequence; --images N changes it")
    return tower


def _vocabulary(flags: Mapping[str, Any], model: Model, assumed: list[str]) -> int:
    """Return the vocabulary's number of tokens, from a known model of this shape, or from the tokenizer.

    A sentence is added to ``assumed``. Raise a ConfigError if both are unknown.
    """
    for path in sorted((Path(__file__).parents[1] / "config" / "models").glob("*.yaml")):
        other = load(path.stem, Model)
        if _shape(other) == _shape(model):
            assumed.append(f"a vocabulary of {other.vocabulary:,}, as {path.stem} has, whose shape this is")
            return other.vocabulary
    if flags.get("tokenizer-type") == "GPT2BPETokenizer" or "merge-file" in flags:
        assumed.append(f"a vocabulary of {_GPT2:,}, as GPT-2's tokenizer has")
        return _GPT2
    raise ConfigError(
        "unknown-size",
        "is missing, and no known model has this shape; add it to the command, or give --vocabulary N",
        key="--vocab-size",
    )


def _shape(model: Model) -> tuple[int, ...]:
    return (model.layers, model.hidden, model.heads, model.key_heads, model.ffn_width, model.experts)
