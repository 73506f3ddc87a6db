"""Convert the words of a Megatron command to a run: model, parallel sizes, schedule, and all other flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import lcm, prod
from pathlib import Path
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.flags import Flags
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.model.arguments import model_of
from megatron_pipemem.model.model import BY_ACTION, Model, Tower
from megatron_pipemem.request import flags_of
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import STOCK, parse_options
from megatron_pipemem.tools.advise.consumers import IMAGES, MEGATRON, TOWER, Consumer
from megatron_pipemem.tools.config.arguments import UNKNOWN, Arguments, FlagTable, MissingSetting, MissingValue, ask_for
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import known_model, load
from megatron_pipemem.tools.config.runs import (
    ADAPTERS,
    FREEZES,
    NUMBERS,
    RECOMPUTE_FLAG,
    Parallelism,
    Run,
    ScheduleChoice,
)
from megatron_pipemem.values import refuse_if, whole_number

_GPUS = "give --gpus N, or --pipemem-check=N"
_VOCABULARIES = (
    ("gpt2bpe|gpt-?2|merges", 50257),
    ("llama-?3|llama3", 128256),
    ("llama|vicuna|mi[sx]tral|sentencepiece", 32000),
    ("qwen-?3\\.[5-9]|qwen-?4", 248320),
    ("qwen", 151936),
    ("deepseek-?v[23]|deepseek-?r1|moonlight|kimi", 129280),
    ("glm", 151552),
    ("gemma", 262144),
    ("baichuan-?2", 125696),
    ("baichuan", 64000),
    ("bert", 30522),
    ("t5", 32128),
)
"""Tokens in the vocabulary by a pattern in the type, name or file of a tokenizer."""
_TOKENIZERS = ("tokenizer-model", "tokenizer-name-or-path", "tokenizer-type", "vocab-file", "hf-checkpoint", "load")
_VOCABULARY, _LENGTH = 128256, 4096  # assumed if nothing says them
_STAND_INS = {"--num-layers": 96, "--hidden-size": 8192, "--num-attention-heads": 64}
"""Values of missing sizes with which the rest of a command is read, to find all that is missing."""
_POSITION = "position-embedding-type"
_POSITIONS = ("learned_absolute", "rope", "yarn", "mrope", "relative", "none")
"""The values of this flag in Megatron's parser."""
_NEAR = 0.9
"""Similarity to a flag of Megatron above which that flag is named beside an unknown one."""
_SPEC = "spec"
"""The flag that names the layers of a model by a function: of Megatron, or of another program."""
_OWN_SPEC = re.compile(r"[\['\"]*megatron\.")
DECISIVE = {
    **dict.fromkeys(
        ("checkpoint-activations", "checkpoint-num-layers", "activation-checkpoint-method"), "recomputation"
    ),
    **dict.fromkeys(("recompute-in-advance", "recompute-in-bubble", "recompute-activation-function"), "recomputation"),
    **dict.fromkeys(("schedules-method", "moe-fb-overlap", "enable-zero-bubble", "use-dualpipe"), "another schedule"),
    **dict.fromkeys(("noop-layers", "num-layer-list"), "other layers in the stages"),
    TOWER: "a vision tower",
    _SPEC: "other layers",
    **dict.fromkeys(("attention-head-type", "use-mqa", "context-parallel-algo"), "another attention"),
    **dict.fromkeys(("swap-attention", "swap-modules", "cpu-offload-optimizer", "optimizer-offload"), "other memory"),
    **dict.fromkeys(("enable-high-availability", "moe-tp-extend-ep", "tp-2d", "tp-x", "tp-y"), "other parallel sizes"),
}
"""Flags of Megatron's forks that change the step, and what they change."""
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
        flags: values of Megatron's flags by the name that the command writes; empty for a file or recipe.
    """

    run: Run
    program: str
    assumed: tuple[str, ...]
    consumer: Consumer = MEGATRON
    not_read: tuple[str, ...] = ()
    flags: Flags = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """Facts that a command or recipe may leave open. Numbers are ``None`` if they are not known otherwise."""

    flag_table: FlagTable  # flags of Megatron's parser
    cluster: Cluster  # whose devices are priced; the number of nodes follows from the command
    devices: int | None = None  # of the whole run
    vocabulary: int | None = None  # tokens in the vocabulary
    images: int | None = None  # in a sequence, for a model with a vision tower
    source: str = ""  # the name of the script or file


_CLUSTERS = {
    **{"a100": "a100-80g", "h100": "h100-80g", "h800": "h100-80g", "h200": "h200-141g"},
    **{"b200": "b200", "gb200": "b200", "mi300": "mi300x", "mi300x": "mi300x"},
}
"""Shipped clusters by the names of devices in scripts and recipes."""
_DEVICE = re.compile(rf"(?:(?<![a-z])|(?<=\dx))({'|'.join(_CLUSTERS)})(?![a-z0-9])", re.IGNORECASE)


def named_cluster(text: str) -> str | None:
    """Return the shipped cluster with the devices that a text names; ``None`` if it names none, or several."""
    clusters = {_CLUSTERS[device.lower()] for device in _DEVICE.findall(text)}
    return clusters.pop() if len(clusters) == 1 else None


def split_command(words: Sequence[str]) -> tuple[dict[str, str], str, Sequence[str]]:
    """Split a command at its program, which is a script, or a module after ``-m``.

    Return the numbers of nodes and processes (``launched``), the program, and the words after it.
    """
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    place = words.index("-m") + 1 if place is None else place
    return launched(words[:place]), words[place], words[place + 1 :]


def read_flags(flags: Mapping[str, Any], launcher: Mapping[str, str], program: str, context: Context) -> Reading:
    """Return the run of a program with these flags (``read_command``).

    Args:
        flags: values by flag without dashes; ``True`` for a flag without a value, a list for several values.
        launcher: numbers of nodes and processes, by torchrun's names without leading dashes (``launched``).
        program: the training program or recipe.
        context: facts that the flags may leave open.
    """
    assumed: list[str] = []
    written, foreign = flags, _stand_in_values(flags)
    flags = _with_length(_with_one_pattern({**flags, **foreign}), assumed)
    args = Arguments(flags, context.flag_table)
    model = _model(args, flags, assumed, context.vocabulary)
    model = replace(model, tower=_tower(flags, assumed, context.images))
    choice = _schedule(args, flags)
    cut, nodes, per_node = _parallelism(args, flags, launcher, context, assumed)
    if choice.name == STOCK:
        cut = replace(cut, chunks=_chunks(flags, model, cut.pp))
        args.mark(cut_flags.VIRTUAL_STAGES, cut_flags.LAYERS_PER_STAGE)
    if model.experts and cut.tp > 1 and not cut.sequence_parallel:
        cut = replace(cut, sequence_parallel=True)
        assumed.append("--sequence-parallel, without which Megatron trains no experts on tensor-parallel ranks; add it")
    is_single = not (args.bf16 or args.fp16)
    cluster = context.cluster.sized(nodes, per_node)
    args.mark(*_OTHERS, "bf16", "fp16", TOWER, IMAGES)
    own = (ADAPTERS, *FREEZES.values())
    unread = {name: value for name, value in args.unread().items() if f"--{name}" in context.flag_table or name in own}
    others = {name: value for name, value in unread.items() if name not in foreign}
    others |= {"bf16": False} if is_single else {"fp16" if args.fp16 else "bf16": True}
    if layout.is_cut(str(flags.get(layout.PATTERN, ""))):
        others[layout.PATTERN] = str(flags[layout.PATTERN])
    run = Run(model, cluster, cut, choice, others)
    if rank := run.execution.adapters:
        assumed.append(
            f"adapters of rank {rank} on all linear layers; the layers' own weights have no W, so a split backward gains "
            "little"
        )
    not_read = _foreign(flags, context.flag_table)
    if foreign:
        values = ", ".join(f"--{name} {shortened(written[name])}" for name in foreign)
        not_read = (f"values that Megatron does not take, and no price depends on: {values}", *not_read)
    return Reading(run, program, tuple(assumed), not_read=not_read, flags={**written})


def _stand_in_values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return other values for flags whose values Megatron's parser refuses, and that no price depends on.

    Positions of other programs (ALiBi, or rotary ones by another name) have no parameters, as rotary ones have none.
    """
    position = flags.get(_POSITION, "rope")
    values: dict[str, Any] = {} if position in _POSITIONS or UNKNOWN in str(position) else {_POSITION: "rope"}
    numbers = {name: limit for name, limit in NUMBERS.items() if UNKNOWN not in str(flags.get(name, UNKNOWN))}
    return values | {name: None for name, limit in numbers.items() if limit.problem(flags[name]) is not None}


def _with_one_pattern(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return flags with the pattern of a hybrid model under the newer of its two names."""
    name, pattern = cut_flags.given_pattern(flags)
    if name in (None, layout.PATTERN):
        return flags
    return {flag: value for flag, value in flags.items() if flag != name} | {layout.PATTERN: pattern}


def _with_length(flags: Mapping[str, Any], assumed: list[str]) -> Mapping[str, Any]:
    """Return flags with a sequence's length. If they have none, it is assumed, and a sentence says so."""
    if {"seq-length", "decoder-seq-length"} & flags.keys():
        return flags
    if "encoder-seq-length" in flags:  # the same to Megatron
        return {**flags, "seq-length": flags["encoder-seq-length"]}
    length = flags.get("max-position-embeddings", _LENGTH)
    assumed.append(f"sequences of {length} tokens, because no --seq-length is given")
    return {**flags, "seq-length": length}


def _foreign(flags: Mapping[str, Any], flag_table: FlagTable) -> tuple[str, ...]:
    """Return a sentence about flags that are not Megatron's, with those that change the step; none if all are."""
    names = [name for name in flags if f"--{name}" not in flag_table or name in DECISIVE]
    names = [name for name in names if name != _SPEC or not _OWN_SPEC.match(str(flags[_SPEC]))]
    own = {ADAPTERS, IMAGES, *FREEZES.values(), *([TOWER] if isinstance(flags.get(TOWER), Tower) else [])}
    names = [name for name in names if name not in own]
    names = [name for name in names if UNKNOWN not in name and not name.startswith("pipemem-")]
    texts = []
    for name in names:
        near = get_close_matches(f"--{name}", flag_table, n=1, cutoff=_NEAR)
        texts.append(f"--{name}" + (f" (did you mean {near[0]}?)" if near and not _is_variation(name, near[0]) else ""))
    if not texts:
        return ()
    rest = decisive(names, "--{}")
    return ("; ".join((f"flags of other programs or versions: {', '.join(texts)}", *rest)),)


def decisive(names: Iterable[str], form: str) -> tuple[str, ...]:
    """Return a sentence about those settings that change the step and are not priced; none if there are none.

    ``form`` is how a setting is written, with ``{}`` for its name.
    """
    flags = {name: name.replace("_", "-") for name in names}
    texts = [f"{form.format(name)} ({DECISIVE[flag]})" for name, flag in flags.items() if flag in DECISIVE]
    return (f"the step is compared without {', '.join(texts)}",) if texts else ()


def named(words: Sequence[str], flag_table: FlagTable) -> dict[str, Any]:
    """Return the values of a program's flags by name without dashes.

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


_NODES, _PER_NODE, _PROCESSES = "nnodes", "nproc-per-node", "processes"
_SRUN = {
    **dict.fromkeys(("N", "nodes"), _NODES),
    **dict.fromkeys(("ntasks-per-node", "gpus-per-node", "gres"), _PER_NODE),
    **dict.fromkeys(("n", "ntasks"), _PROCESSES),
}
_MPI = {
    **dict.fromkeys(("np", "n", "c", "num-proc"), _PROCESSES),
    **dict.fromkeys(("npernode", "N", "ppn", "map-by"), _PER_NODE),
}
LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    "torchrun": {"nnodes": _NODES, "nproc-per-node": _PER_NODE},
    "deepspeed": {"num-nodes": _NODES, "num-gpus": _PER_NODE},
    "accelerate": {"num-machines": _NODES, "num-processes": _PROCESSES},
    "sbatch": {**_SRUN, "gpus": _PROCESSES},
    "srun": _SRUN,
    **dict.fromkeys(("mpirun", "mpiexec", "horovodrun"), _MPI),
}
"""Options of launchers that give the numbers of nodes, of processes on each node, and of all processes."""
_STARTS_NODES = ("torchrun", "deepspeed", "accelerate")
"""Launchers that start a node's processes, so that those of a launcher before them are nodes."""


def launched(words: Sequence[str]) -> dict[str, str]:
    """Return the numbers of nodes and processes that the launchers before a program give, by torchrun's names.

    Words before the first launcher are those of an sbatch.
    """
    numbers: dict[str, str] = {}
    program = "sbatch"
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("torch.distributed."):
            name = "torchrun"
        if (base := name.rpartition("/")[2]) in LAUNCHERS and not equals:
            program = base
            if base in _STARTS_NODES:
                tasks = numbers.pop(_PROCESSES, None)
                per_node = numbers.pop(_PER_NODE, "1") if tasks else "1"
                if tasks and per_node == "1":
                    numbers.setdefault(_NODES, tasks)
            continue
        if not name.startswith("-"):
            if base in ("python", "python3", "bash", "numactl", "env", "timeout", "nohup", "taskset"):
                program = "" if base in ("numactl", "taskset", "timeout", "env", "nohup") else program
            continue
        value = value if equals else "".join(words[place + 1 : place + 2])
        option = name.lstrip("-").replace("_", "-")
        meaning = LAUNCHERS.get(program, {}).get(option) or LAUNCHERS["torchrun"].get(option)
        if meaning is None and not equals and (short := re.fullmatch(r"-([Nn])(\d+)", name)):
            meaning, value = LAUNCHERS.get(program, {}).get(short[1]), short[2]
        if option == "gres" or option == "map-by":
            number = re.search(r"(?:gpu|ppr)[:\w]*?:(\d+)", value)
            meaning, value = (meaning, number[1]) if number else (None, "")
        if meaning is not None:
            numbers[meaning] = value
    return numbers


def _whole(text: str | None) -> int | None:
    """Return a launcher's number; for a range of nodes like ``2:4``, the greatest. ``None`` if it is not a number."""
    match = re.fullmatch(r"(?:\d+:)?(\d+)", text or "")
    return int(match[1]) if match else None


def started(launcher: Mapping[str, str], context: Context) -> int | None:
    """Return the number of devices that the user or a launcher gives; ``None`` if neither does."""
    total = context.devices or _whole(launcher.get(_PROCESSES))
    nodes, per_node = _whole(launcher.get(_NODES)), _whole(launcher.get(_PER_NODE))
    return total or (nodes * per_node if nodes and per_node else None)


def _devices(
    args: Arguments,
    flags: Mapping[str, Any],
    launcher: Mapping[str, str],
    context: Context,
    unit: int,
    assumed: list[str],
) -> tuple[int, int]:
    """Return the number of devices, and that of each node.

    What the command leaves open is assumed: the fewest devices that the parallel sizes and the launcher allow, a multiple
    of ``unit``. A sentence is added to ``assumed``.
    """
    per_node = _whole(launcher.get(_PER_NODE)) or _program_number(flags, args, "actor-num-gpus-per-node")
    nodes = _whole(launcher.get(_NODES)) or _program_number(flags, args, "actor-num-nodes")
    total = started(launcher, context)
    if total is None and per_node is not None and nodes is not None:
        total = per_node * nodes
    if total is None:
        full = per_node or (context.cluster.devices_per_node if nodes is not None else 1)
        total = lcm(unit, full * (nodes or 1))
        unknown = dict.fromkeys(text.split(UNKNOWN)[1] for text in launcher.values() if UNKNOWN in text)
        why = f"{', '.join(unknown)} not being known" if unknown else "as the command does not give their number"
        assumed.append(f"{total} devices, the fewest that the parallel sizes allow, {why}; --gpus N changes it")
    elif context.devices is None and total < unit:
        few = f"because its {total} are fewer than the parallel sizes need"
        total = unit
        assumed.append(f"{total} devices, {few}; --gpus N changes it")
    return total, min(per_node or context.cluster.devices_per_node, total)


def _parallelism(
    args: Arguments, flags: Mapping[str, Any], launcher: Mapping[str, str], context: Context, assumed: list[str]
) -> tuple[Parallelism, int, int]:
    """Return the parallel sizes, the number of nodes, and the number of devices of each node.

    Sentences are added to ``assumed`` about sizes that the command leaves open. Raise a ConfigError if the number of
    devices does not fit the parallel sizes.
    """
    tp, pp, cp, ep = (
        _size(args, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    micro = _size(args, "micro_batch_size")
    if args.micro_batch_size is None:
        assumed.append("microbatches of 1 sequence, because no --micro-batch-size is given")
    group, etp = tp * pp * cp, args.expert_tensor_parallel_size
    experts = pp * ep * (etp or tp)
    devices, per_node = _devices(args, flags, launcher, context, lcm(group, experts), assumed)
    uneven = f"tp x pp x cp = {group} does not divide {devices} devices; {_GPUS}"
    refuse_if(devices % group, "does-not-divide", "devices", uneven)
    dp = devices // group
    batch = args.global_batch_size or micro * dp
    if not args.global_batch_size:
        assumed.append(f"a global batch of {batch}, one microbatch a replica, because no --global-batch-size is given")
    small = f"{batch} is less than micro batch x dp = {micro} x {dp}; give a larger batch, or fewer devices (--gpus N)"
    refuse_if(batch < micro * dp, "does-not-divide", "--global-batch-size", small)
    cut = Parallelism(tp, pp, dp, cp, ep, None if etp == tp else etp, None, micro, batch, bool(args.sequence_parallel))
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
    if recompute == "full":
        settings["recompute_method"] = args.recompute_method or "uniform"
        settings["recompute_num_layers"] = args.recompute_num_layers or 1
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
    except MissingValue:
        raise
    except ConfigError as error:
        key = error.key if error.key is None or error.key.startswith("--") else _flag(error.key)
        if error.code == "unknown-size" and key in _STAND_INS:
            raise MissingSetting(error.message, key, f"{key}={_STAND_INS[key]}") from error
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
    tower = flags.get(TOWER)
    if not isinstance(tower, Tower):  # a flag with this name is another program's
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


_LAYERS = re.compile(r"^num_layers: (\d+)$", re.MULTILINE)


def _vocabulary(flags: Mapping[str, Any], model: Model, assumed: list[str]) -> int:
    """Return the vocabulary's number of tokens, from a known model of this shape, or from the tokenizer.

    If both are unknown, a number is assumed. A sentence is added to ``assumed``.
    """
    for path in sorted((Path(__file__).parents[1] / "config" / "models").glob("*.yaml")):
        layers = _LAYERS.search(path.read_text())
        if layers is not None and int(layers[1]) != model.layers:  # reading the whole file takes long
            continue
        other = load(path.stem, Model)
        if _shape(other) == _shape(model):
            assumed.append(f"a vocabulary of {other.vocabulary:,}, as {path.stem} has, whose shape this is")
            return other.vocabulary
    names = [str(flags.get(name, "")) for name in _TOKENIZERS]
    for name in names:
        if name and (known := known_model(name)) is not None:
            assumed.append(f"a vocabulary of {known.vocabulary:,}, as {name} has")
            return known.vocabulary
    text = " ".join(["merges" * ("merge-file" in flags), *names]).lower()
    for pattern, tokens in _VOCABULARIES:
        if match := re.search(pattern, text):
            assumed.append(f"a vocabulary of {tokens:,}, as the tokenizer of {match[0]} has; --vocabulary N changes it")
            return tokens
    assumed.append(
        f"a vocabulary of {_VOCABULARY:,}, because neither flag nor tokenizer says it; --vocabulary N changes it"
    )
    return _VOCABULARY


def _shape(model: Model) -> tuple[int, ...]:
    return (model.layers, model.hidden, model.heads, model.key_heads, model.ffn_width, model.experts)
