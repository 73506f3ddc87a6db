"""Read from the training script's flags how a model is cut into stages, and refuse flags that exclude a placement.

A run does this when it reads its command line, and the launcher before it starts ranks. Both get the layers per stage
here. Names of flags have no leading dashes here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_pipemem.choose.model_cut import Cut, check_cut, is_folded, known_chunks, placements_of
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.model import layout
from megatron_pipemem.model.counts import layer_weights
from megatron_pipemem.model.model import SIZE_ATTRIBUTES, Sublayer, grouped_layers
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import families
from megatron_pipemem.schedule.schedule import Schedule

Flags = Mapping[str, Any]
"""Values by the names of flags, as text or as in a run's configuration; ``True`` for a flag without a value."""

VIRTUAL_STAGES = "num-virtual-stages-per-pipeline-rank"
LAYERS_PER_STAGE = "num-layers-per-virtual-pipeline-stage"
LAYOUT = "pipemem-layout"
CUTS = (VIRTUAL_STAGES, LAYERS_PER_STAGE, layout.FLAG, *layout.PATTERN_FLAGS)
REPLACED_BY_LAYOUT = (*CUTS, *layout.FIRST_OR_LAST, *layout.ACCOUNTED)
"""Flags that cut a model. A layout replaces them."""


def is_given(flags: Flags, name: str) -> bool:
    """Return whether a flag is given. In a run's configuration, ``false`` and ``null`` mean that it is not."""
    return flags.get(name) not in (None, False)


def without_flags(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without the flags with these names, and without their values."""
    kept, drops = [], False
    for word in arguments:
        drops = word[2:].partition("=")[0] in names if word.startswith("--") else drops
        if not drops:
            kept.append(word)
    return kept


def cut_of(flags: Flags, num_devices: int, layers: int | None) -> Cut | None:
    """Return the cut of a model that the flags ask for; ``None`` if they ask for none, or if Megatron will refuse it.

    Flags that give layers per stage count only if the number of ``layers`` is known.
    """
    name, pattern = given_pattern(flags)
    if name is not None:
        if not layout.is_cut(pattern):
            return None
        segments = len(layout.segments(pattern))
        return Cut(
            segments / num_devices,
            f"the {segments} segments of --{name} on {num_devices} pipeline ranks",
            lambda chunks: f"write {num_devices * chunks} segments with | between them, or no |, for an automatic cut",
        )
    if is_given(flags, layout.FLAG):
        stages = len(layout.read(str(flags[layout.FLAG])))
        return Cut(
            stages / num_devices,
            f"the {stages} stages of --{layout.FLAG} on {num_devices} pipeline ranks",
            lambda chunks: f"write {num_devices * chunks} stages{_example(flags, layers, num_devices * chunks)}",
        )
    number = _whole(flags.get(VIRTUAL_STAGES))
    if number is not None:
        if layers is not None and number * num_devices > layers + accounted(flags):
            raise UnsupportedError(
                "too-few-layers",
                f"--{VIRTUAL_STAGES} {number} makes {number * num_devices:,} stages on {num_devices} pipeline ranks, more than "
                f"{counted_layers(flags, layers)}; pass a smaller number, or the layers of each stage by --{layout.FLAG}",
            )
        return Cut(number, f"--{VIRTUAL_STAGES} {number}", lambda chunks: _pass_virtual_stages(chunks, "instead"))
    number = _whole(flags.get(LAYERS_PER_STAGE))
    if number is not None and layers is not None:
        total = layers + accounted(flags)
        return Cut(
            total / (num_devices * number) if number > 0 else 0,
            f"--{LAYERS_PER_STAGE} {number} for {total} layers on {num_devices} pipeline ranks",
            lambda chunks: _pass_virtual_stages(chunks, "in its place"),
        )
    return None


def given_pattern(flags: Flags) -> tuple[str | None, str]:
    """Return the name of the flag with a hybrid model's layer pattern, and the pattern; ``(None, "")`` if not given."""
    name = next((name for name in layout.PATTERN_FLAGS if is_given(flags, name)), None)
    return (None, "") if name is None else (name, str(flags[name]))


def cut_pattern(flags: Flags, placement: Placement, with_head: bool) -> str | None:
    """Return the flag with a hybrid model's layer pattern, cut so that the slowest device is as fast as possible.

    Every rank gets a layer with experts if ``check_experts`` demands that. Flags for the layers of the first or last
    rank decide in place of the speed. The result is ``None`` for other models, and for a pattern that Megatron refuses,
    or that is cut already. With ``with_head``, the last stage also has the LM head.
    """
    from megatron_pipemem.model.partition import Loads, partition  # numpy takes a while to load

    name, pattern = given_pattern(flags)
    if name is None or layout.is_cut(pattern):
        return None
    if any(is_given(flags, flag) for flag in layout.FIRST_OR_LAST):
        return f"--{name}={layout.cut(pattern, counts_of_ends(flags, len(layout.pattern_layers(pattern)), placement))}"
    sizes, sequence = sizes_of(flags), _whole(flags.get("seq-length")) or 0
    seconds = layer_weights(sizes, layout.pattern_layers(pattern), sequence)
    if not any(seconds):
        return None  # and Megatron refuses the pattern
    rows = _whole(flags.get("padded-vocab-size")) or _whole(flags.get("vocab-size")) or 0
    head = sizes.hidden_size * rows if with_head else 0.0
    # Two replicas have their stages on the devices in opposite orders, so each is cut for itself.
    alone = Placement.linear(placement.num_devices) if placement.replicas > 1 else placement
    needed, tied = layout.needed_layers(pattern, flags), grouped_layers("".join(layout.segments(pattern)))
    return (
        f"--{name}={layout.cut(pattern, partition(Loads(seconds, last_seconds=head, needed=needed, tied=tied), alone))}"
    )


_DEFAULTS = {"moe_router_topk": 2, "kv_lora_rank": 32}
"""Megatron's values of arguments without a flag, if ``Model`` has other ones."""


def sizes_of(flags: Flags) -> SimpleNamespace:
    """Return the arguments of Megatron from which the sizes of layers follow. A value that is no number is left out."""
    sizes = {name: _whole(flags.get(name.replace("_", "-"))) for name in SIZE_ATTRIBUTES.values()}
    present = {name: size for name, size in sizes.items() if size is not None}
    return SimpleNamespace(**_DEFAULTS | present, swiglu=is_given(flags, "swiglu"))


def check_experts(flags: Flags, pattern: str, placement: Placement) -> None:
    """Raise an UnsupportedError if a cut pattern leaves a rank without experts, because Megatron's log would hang."""
    if not any(layout.needed_layers(pattern, flags)):
        return
    segments = layout.segments(pattern)
    for device, stages in enumerate(placement.stages):
        own_segments = [segments[stage % len(segments)] for stage in stages]
        if Sublayer.EXPERTS not in "".join(own_segments):
            raise UnsupportedError(
                "bad-layout",
                f"pipeline rank {device} would hold no experts ({', '.join(own_segments) or 'nothing'}), and Megatron hangs "
                "when it logs the losses of all ranks' experts; end the stages by | so that every rank has an E, or pass "
                "--moe-router-load-balancing-type none",
            )


def accounted(flags: Flags) -> int:
    """Return how many layers (0, 1 or 2) Megatron adds for embedding and loss when it cuts a model evenly."""
    return sum(is_given(flags, name) for name in layout.ACCOUNTED)


def counted_layers(flags: Flags, layers: int) -> str:
    """Return a text for messages with the number of layers that Megatron cuts evenly."""
    names = " and ".join(f"--{name}" for name in layout.ACCOUNTED if is_given(flags, name))
    return f"{layers} layers" + (f" with those that {names} adds" if names else "")


def possible_placements(
    flags: Flags,
    schedule: str,
    options: Mapping[str, Any],
    num_devices: int,
    layers: int | None,
    file: Schedule | None = None,
) -> tuple[Placement, ...]:
    """Return the placements that a family, ``auto`` or the schedule of a file may have on a model with these flags."""
    cut = cut_of(flags, num_devices, layers)
    if file is None:
        placements = placements_of(schedule, options, num_devices, cut)
    else:
        placements = (file.placement,)
        if cut is not None:
            check_cut(cut, schedule, file.placement)
    check_placements(flags, schedule, placements)
    if layers is not None:
        _check_enough(flags, layers, num_devices, known_chunks(placements[0]))
    return placements


def check_layers(flags: Flags, layers: int, num_devices: int, chunks: int) -> None:
    """Raise an UnsupportedError if Megatron cannot share out the layers evenly over the stages and no flag cuts them."""
    if (reason := why_not_even(flags, layers, num_devices, chunks)) is not None:
        raise UnsupportedError(
            "does-not-divide",
            f"{reason}; give the layers of each stage, for example by --{layout.FLAG} "
            f"'{_written(flags, layout.spread(layers, num_devices * chunks))}', or pass --pipemem-layout auto",
        )


def why_not_even(flags: Flags, layers: int, num_devices: int, chunks: int) -> str | None:
    """Return the reason why Megatron cannot share out the layers evenly over the stages, if no flag cuts the model."""
    _check_enough(flags, layers, num_devices, chunks)
    stages = num_devices * chunks
    if _is_cut(flags) or (layers + accounted(flags)) % stages == 0:
        return None
    return (
        f"{counted_layers(flags, layers)} cannot be split evenly over {stages} stages ({num_devices} pipeline ranks x {chunks} "
        "chunks)"
    )


def _check_enough(flags: Flags, layers: int, num_devices: int, chunks: int) -> None:
    """Raise an UnsupportedError for a model with fewer layers than stages, if no flag cuts the model."""
    stages = num_devices * chunks
    if not _is_cut(flags) and layers < stages and (layers + accounted(flags)) % stages:
        raise UnsupportedError(
            "too-few-layers",
            f"{layers} layers are too few for {stages} stages ({num_devices} pipeline ranks x {chunks} chunks); take fewer "
            "ranks, or a schedule with fewer chunks per rank",
        )


def _is_cut(flags: Flags) -> bool:
    cuts_itself = flags.get(LAYOUT) == AUTO
    return cuts_itself or any(is_given(flags, name) for name in (*CUTS, *layout.FIRST_OR_LAST))


class LayoutFlag(NamedTuple):
    """A layout that replaces other flags that cut the model."""

    text: str
    why: str


def needed_layout(flags: Flags, layers: int, num_devices: int, placement: Placement) -> LayoutFlag | None:
    """Return the layout that the stages need in place of Megatron's own cut; ``None`` if none is needed or possible.

    A layout is needed for layers that do not divide evenly, and for the layers of the first or last rank in a V or
    wave. There the first stage of the model gets as many layers as every chunk of Megatron's first rank, and the last
    stage likewise. The other stages share the rest evenly.
    """
    chunks = known_chunks(placement)
    stages = num_devices * chunks
    has_ends = any(is_given(flags, name) for name in layout.FIRST_OR_LAST)
    if has_ends and not is_folded(placement):
        _layers_of_ends(flags, placement)
    if any(is_given(flags, name) for name in CUTS if name != VIRTUAL_STAGES) or (has_ends and not is_folded(placement)):
        return None
    if not has_ends and ((layers + accounted(flags)) % stages == 0 or layers < stages):
        return None
    counts = counts_of_ends(flags, layers, placement)
    why = (
        f"the ranks of {placement.name} hold other stages than Megatron's"
        if has_ends
        else f"{counted_layers(flags, layers)} do not divide evenly by {stages} stages"
    )
    return LayoutFlag(_written(flags, counts), why)


def _layers_of_ends(flags: Flags, placement: Placement) -> list[int | None]:
    """Return the layers of every chunk of Megatron's first rank and of its last rank, if flags give them."""
    chunks, counts = known_chunks(placement), [_whole(flags.get(name)) for name in layout.FIRST_OR_LAST]
    for name, count in zip(layout.FIRST_OR_LAST, counts, strict=True):
        if count is not None and count % chunks and not is_folded(placement):
            raise UnsupportedError(
                "does-not-divide",
                f"--{name} {count} does not divide by {chunks} chunks per pipeline rank; pass a multiple of {chunks}, or the "
                f"layers of each stage by --{layout.FLAG}, or by | in --{layout.PATTERN}",
            )
    return [None if count is None else count // chunks for count in counts]


def counts_of_ends(flags: Flags, layers: int, placement: Placement) -> tuple[int, ...]:
    """Return the layers of every stage, as even as flags for the first or last rank, for embedding and loss allow.

    In a V or wave, the first stage of the model gets as many layers as every chunk of Megatron's first rank, and the last
    stage likewise. Raise an UnsupportedError if a stage would have less than no layers, or layers would be left over.
    """
    stages = placement.model_stages
    period = stages if is_folded(placement) else placement.num_devices
    ends = zip((0, period - 1), _layers_of_ends(flags, placement), strict=True)
    of_ends = {stage: count for end, count in ends if count is not None for stage in range(end, stages, period)}
    remaining, others = layers + accounted(flags) - sum(of_ends.values()), stages - len(of_ends)
    spread = iter(layout.spread(remaining, others))
    counts = [of_ends[stage] if stage in of_ends else next(spread) for stage in range(stages)]
    counts[0] -= is_given(flags, layout.ACCOUNTED[0])
    counts[-1] -= is_given(flags, layout.ACCOUNTED[1])
    if remaining < others or min(counts) < 0:
        raise UnsupportedError(
            "too-few-layers",
            f"{layers} layers are too few for {stages} stages if flags set the layers of the first or last pipeline "
            "rank; take fewer ranks, a schedule with fewer chunks per rank, or other numbers for these flags",
        )
    if remaining and not others:
        raise UnsupportedError(
            "does-not-divide",
            f"--{' and --'.join(layout.FIRST_OR_LAST)} leave {remaining} of {layers} layers without a stage on "
            f"{stages} stages; pass one of them, or numbers with the sum {layers}",
        )
    return tuple(counts)


def check_placements(flags: Flags, schedule: str, placements: Sequence[Placement]) -> None:
    """Raise an UnsupportedError if a given flag does not work on one of these placements (``_REFUSED``)."""
    for names, refused, sentence in _REFUSED:
        name = next((name for name in names if is_given(flags, name)), None)
        placement = next((candidate for candidate in placements if refused(candidate)), None)
        if name is not None and placement is not None:
            raise UnsupportedError(
                "unsupported-setting",
                f"--{name} does not go with schedule {schedule} (placement {placement.name}): {sentence}",
            )


def remarks(flags: Flags, schedule: str) -> list[str]:
    """Return a sentence on each flag without effect, that ties checkpoints to this placement, or meets a fault of Megatron."""
    sentences = [
        f"--{name} has no effect: the schedule's messages go over channels of its own, in the order of its plan"
        for name in _WITHOUT_EFFECT
        if is_given(flags, name)
    ]
    if is_given(flags, GROUP_SIZE) and not any(
        "group_size" in chosen.options for chosen in families() if chosen.name == schedule
    ):
        sentences.append(f"--{GROUP_SIZE} has no effect: schedule {schedule} has no groups of microbatches")
    if is_given(flags, "save") and saves_optimizer_by_rank(flags):
        sentences.append(
            "the distributed optimizer's state is saved in a form that only a run with the same placement, layout and sizes "
            f"can load; pass --{RESHARDABLE} to resume under other schedules"
        )
    if flags.get("ckpt-format") == "torch":
        sentences.append(
            "--ckpt-format torch writes a file with the chunks of each rank, which only a run with the same placement can load"
            "; pass --ckpt-format torch_dist to load it under other schedules"
        )
    return [*sentences, *upstream_faults(flags)]


def saves_optimizer_by_rank(flags: Flags) -> bool:
    """Return whether checkpoints have the optimizer's state in a form that fits one placement only."""
    others = (RESHARDABLE, "no-save-optim", "use-megatron-fsdp")
    return is_given(flags, "use-distributed-optimizer") and not any(is_given(flags, name) for name in others)


def upstream_faults(flags: Flags) -> list[str]:
    """Return a sentence on each flag that does not do under a pipeline what it says, with Megatron's own schedules too."""
    if is_given(flags, _DOCUMENT_MASK) and (_whole(flags.get("pipeline-model-parallel-size")) or 1) > 2:
        return [
            f"--{_DOCUMENT_MASK} reaches the first and the last pipeline rank only: Megatron's pretrain_gpt.py gives the "
            "ranks between no mask, and their layers attend across documents; pack documents as Megatron's --sft does, or "
            "pass the mask on every rank in a script of your own"
        ]
    return []


def _has_chunks(placement: Placement) -> bool:
    return known_chunks(placement) > 1


_ONE_CHUNK = ", or use a schedule with one model chunk per rank, such as zb-h1"
# No rows of ``gates``, whose wish has at most one placement: a start asks these of every placement that a search may choose,
# and a training rank cannot ask again, because these flags are attributes of no configuration of Megatron.
_REFUSED: tuple[tuple[tuple[str, ...], Callable[[Placement], bool], str], ...] = (
    (
        ("iterations-to-skip",),
        _has_chunks,
        "Megatron skips batches of one data iterator per rank, and here every model chunk has its own iterator; drop "
        f"the flag{_ONE_CHUNK}",
    ),
    (
        ("full-validation",),
        _has_chunks,
        "Megatron measures the length of the validation data on every model chunk, and chunks in the middle of the "
        f"model have no data; pass --eval-iters{_ONE_CHUNK}",
    ),
    (
        ("multiple-validation-sets",),
        _has_chunks,
        "Megatron mistakes the iterators of the model chunks for those of the validation sets; drop the "
        f"flag{_ONE_CHUNK}",
    ),
    (
        ("logits-save-dir", "logits-load-dir"),
        lambda placement: True,
        "Megatron looks for logits on every pipeline rank, and only the last stage has them; train without a pipeline",
    ),
    (
        ("inprocess-restart",),
        lambda placement: True,
        "the schedule's channels of the failed attempt would stay open; drop the flag, and let the launcher restart "
        "ranks (torchrun --max-restarts)",
    ),
    (
        ("perform-rl-step",),
        lambda placement: is_folded(placement) or placement.replicas > 1,
        "generation looks for the model's last stage on the last pipeline rank, and here it is on another rank; use a "
        "schedule with linear or interleaved placement",
    ),
)
GROUP_SIZE = "microbatch-group-size-per-virtual-pipeline-stage"
_DOCUMENT_MASK = "reset-attention-mask"
RESHARDABLE = "dist-ckpt-optim-fully-reshardable"
_WITHOUT_EFFECT = (
    "use-ring-exchange-p2p",
    "pipeline-model-parallel-comm-backend",
    "no-overlap-p2p-communication",
    "overlap-p2p-communication-warmup-flush",
)


def _written(flags: Flags, counts: Sequence[int]) -> str:
    """Return the layout with these layers per stage, and with multi-token prediction on the last stage."""
    ahead = _whole(flags.get("mtp-num-layers")) or 0
    return layout.written((*counts[:-1], counts[-1] + (ahead > 0)), ahead)


def _example(flags: Flags, layers: int | None, stages: int) -> str:
    if layers is None or layers < stages:
        return ""
    return f", for example '{_written(flags, layout.spread(layers, stages))}'"


def _pass_virtual_stages(chunks: int, ending: str) -> str:
    return "leave it out" if chunks == 1 else f"pass --{VIRTUAL_STAGES} {chunks} {ending}"


def _whole(value: object) -> int | None:
    try:
        return None if value is None else int(str(value))
    except ValueError:
        return None
