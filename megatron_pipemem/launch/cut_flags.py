"""Read from the training script's flags how a model is cut, and refuse flags that do not go with a placement.

A run asks here when it takes its command line, the launcher before it starts ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_pipemem.choose.model_cut import Cut, check_cut, known_chunks, placements_of
from megatron_pipemem.config import layout
from megatron_pipemem.config.model import Sublayer
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.planner import counts as weights
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import families
from megatron_pipemem.schedule.schedule import Schedule

Flags = Mapping[str, Any]
"""Name without dashes in front -> value, as text or as it is in a run's file; ``True`` for a bare flag."""

VIRTUAL_STAGES = "num-virtual-stages-per-pipeline-rank"
LAYERS_PER_STAGE = "num-layers-per-virtual-pipeline-stage"
CUTS = (VIRTUAL_STAGES, LAYERS_PER_STAGE, layout.FLAG, *layout.PATTERN_FLAGS)
_ACCOUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def given(flags: Flags, name: str) -> bool:
    """Return whether a flag is there; a run's file may say that it is not."""
    return flags.get(name) not in (None, False)


def cut_of(flags: Flags, num_devices: int, layers: int | None) -> Cut | None:
    """Return how these flags cut a model; ``None`` where they leave it to the schedule, or where Megatron will refuse
    them.

    Args:
        flags: of the training script.
        num_devices: pipeline ranks.
        layers: of the model; ``None`` where they are not known.

    Raises:
        UnsupportedError: more virtual stages are asked for than the model has layers.
    """
    name, pattern = pattern_of(flags)
    if name is not None:
        if not layout.is_cut(pattern):
            return None
        segments = len(layout.segments(pattern))
        return Cut(
            segments / num_devices,
            f"the {segments} segments of --{name} on {num_devices} pipeline ranks",
            lambda chunks: (
                f"write {num_devices * chunks} segments with | between them, or none: where they end is then worked out"
            ),
        )
    if given(flags, layout.FLAG):
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
                f"{counted_layers(flags, layers)}; pass a smaller number, or what each stage holds by --{layout.FLAG}",
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


def pattern_of(flags: Flags) -> tuple[str | None, str]:
    """Return the flag that says the layers of a hybrid model, and the layers; ``None`` and nothing for other models."""
    name = next((name for name in layout.PATTERN_FLAGS if given(flags, name)), None)
    return (None, "") if name is None else (name, str(flags[name]))


def cut_pattern(flags: Flags, placement: Placement, with_head: bool) -> str | None:
    """Return the flag with a hybrid model's layers cut so that the slowest device is as fast as whole layers allow, and has
    experts where `check_experts` demands them.

    It is ``None`` for other models, and where flags say already how the layers are shared out.

    Args:
        flags: of the training script, without dashes.
        placement: of the stages.
        with_head: whether the last stage has the output layer.
    """
    from megatron_pipemem.planner.partition import Loads, partition  # numpy takes a while to load

    name, pattern = pattern_of(flags)
    first_or_last = known_chunks(placement) == 1 and any(given(flags, each) for each in layout.FIRST_OR_LAST)
    if name is None or layout.is_cut(pattern) or first_or_last:
        return None
    sizes, sequence = weights.sizes_of(flags), _whole(flags.get("seq-length")) or 0
    layers = layout.pattern_layers(pattern)
    seconds = [weights.layer_weight(symbol, sizes, sequence) for symbol in layers]
    if not any(seconds):
        return None  # and Megatron says what is wrong
    rows = _whole(flags.get("padded-vocab-size")) or _whole(flags.get("vocab-size")) or 0
    head = weights.head_weight(sizes, rows) if with_head else 0.0
    # Two replicas go over the devices in opposite directions, so each is cut for itself.
    alone = Placement.linear(placement.num_devices) if placement.replicas > 1 else placement
    needed = layout.needed_layers(pattern, flags)
    return f"--{name}={layout.cut(pattern, partition(Loads(seconds, last=head, needed=needed), alone))}"


def check_experts(flags: Flags, pattern: str, placement: Placement) -> None:
    """Check that Megatron can log the losses of a hybrid model's experts: it waits for ever where a rank has none of them.

    Args:
        flags: of the training script, without dashes.
        pattern: of the model, cut.
        placement: of the stages.

    Raises:
        UnsupportedError: a rank has no experts, and others have.
    """
    if not any(layout.needed_layers(pattern, flags)):
        return
    segments = layout.segments(pattern)
    for device, stages in enumerate(placement.stages):
        held = [segments[stage % len(segments)] for stage in stages]
        if Sublayer.EXPERTS not in "".join(held):
            raise UnsupportedError(
                "bad-layout",
                f"pipeline rank {device} would hold no experts ({', '.join(held) or 'nothing'}), and Megatron's log of their "
                "losses waits for ever for those of every rank; end the stages by | so that every rank has an E, or pass "
                "--moe-router-load-balancing-type none",
            )


def as_built(chunks: int) -> Cut:
    """Return how Megatron is about to build a model, or has built it, whatever asked for that."""

    def remedy(needed: int) -> str:
        if needed == 1:
            return f"drop --{VIRTUAL_STAGES} or whatever else asks for virtual stages"
        return (
            f"pass --{VIRTUAL_STAGES} {needed} or a --{layout.FLAG} (for a hybrid model, a --{layout.PATTERN} with |) with "
            "that many stages per rank, or, without "
            f"megatron.training, virtual_pipeline_model_parallel_size={needed} to initialize_model_parallel() and in the "
            "model's configuration"
        )

    return Cut(chunks, "what Megatron builds", remedy)


def accounted(flags: Flags) -> int:
    """Return how many of embedding and loss count as a layer when Megatron shares layers out evenly."""
    return sum(given(flags, name) for name in _ACCOUNTED)


def counted_layers(flags: Flags, layers: int) -> str:
    """Say, for messages, how many layers Megatron shares out evenly, and by which flags that is more than the model's."""
    names = " and ".join(f"--{name}" for name in _ACCOUNTED if given(flags, name))
    return f"{layers} layers" + (f" and what {names} adds to them" if names else "")


def checked_placements(
    flags: Flags,
    schedule: str,
    options: Mapping[str, Any],
    num_devices: int,
    layers: int | None,
    file: Schedule | None = None,
) -> tuple[Placement, ...]:
    """Return the placements that a schedule may have on a model that these flags cut.

    Args:
        flags: of the training script.
        schedule: a family, ``auto``, or the name of a schedule file.
        options: of the schedule, as the user gave them.
        num_devices: pipeline ranks.
        layers: of the model; ``None`` where they are not known.
        file: what the schedule file holds.

    Raises:
        UnsupportedError: the schedule does not run a model that is cut so, or a flag does not go with its placement.
    """
    cut = cut_of(flags, num_devices, layers)
    if file is None:
        placements = placements_of(schedule, options, num_devices, cut)
    else:
        placements = (file.placement,)
        if cut is not None:
            check_cut(cut, schedule, file.placement)
    check_placements(flags, schedule, placements)
    if layers is not None:
        check_layers(flags, layers, num_devices, known_chunks(placements[0]))
    return placements


def check_layers(flags: Flags, layers: int, num_devices: int, chunks: int) -> None:
    """Refuse layers that Megatron cannot share out over the stages, where no flag says how the model is cut.

    Args:
        flags: of the training script.
        layers: of the model.
        num_devices: pipeline ranks.
        chunks: stages per pipeline rank.

    Raises:
        UnsupportedError: the message has a layout that can, if there are enough layers.
    """
    stages = num_devices * chunks
    said = any(given(flags, name) for name in (*CUTS, *layout.FIRST_OR_LAST))
    if said or (layers + accounted(flags)) % stages == 0:
        return
    over = f"{stages} stages ({num_devices} pipeline ranks x {chunks} chunks)"
    if layers < stages:
        raise UnsupportedError(
            "too-few-layers",
            f"{layers} layers are too few for the {over}; take fewer ranks, or a schedule with fewer chunks per rank",
        )
    raise UnsupportedError(
        "does-not-divide",
        f"{counted_layers(flags, layers)} cannot be split evenly over {over}; say what each holds, for example "
        f"--{layout.FLAG} '{_spread(flags, layers, stages)}'",
    )


def check_placements(flags: Flags, schedule: str, placements: Sequence[Placement]) -> None:
    """Check that flags mean on all of these placements what they mean on Megatron's own.

    Args:
        flags: of the training script, without dashes.
        schedule: its name, for the error's sentence.
        placements: that the run may take.

    Raises:
        UnsupportedError: one of them does not; the message says what to do instead.
    """
    for names, refused, sentence in _REFUSED:
        name = next((name for name in names if given(flags, name)), None)
        placement = next((each for each in placements if refused(each)), None)
        if name is not None and placement is not None:
            raise UnsupportedError(
                "unsupported-setting",
                f"--{name} does not go with schedule {schedule} (placement {placement.name}): {sentence}",
            )


def remarks(flags: Flags, schedule: str) -> list[str]:
    """Return what the user should know of flags that go with every schedule but do less than with Megatron's own.

    Args:
        flags: of the training script, without dashes.
        schedule: its name.
    """
    found = [
        f"--{name} has no effect: the schedule's messages go over channels of its own, in the order of its plan"
        for name in _WITHOUT_EFFECT
        if given(flags, name)
    ]
    if given(flags, GROUP_SIZE) and not any(
        "group_size" in each.options for each in families() if each.name == schedule
    ):
        found.append(f"--{GROUP_SIZE} has no effect: schedule {schedule} has no groups of microbatches")
    if (
        given(flags, "save")
        and given(flags, "use-distributed-optimizer")
        and not any(given(flags, name) for name in (_RESHARDABLE, "no-save-optim", "use-megatron-fsdp"))
    ):
        found.append(
            "the distributed optimizer's state is saved in the form of this placement, which only a run of the same placement, "
            f"layout and sizes can load; pass --{_RESHARDABLE} to resume under other schedules"
        )
    if flags.get("ckpt-format") == "torch":
        found.append(
            "--ckpt-format torch writes a file for every rank with the chunks that it holds, which only a run of the same "
            "placement can load; pass --ckpt-format torch_dist to load it under other schedules"
        )
    return found


def is_folded(placement: Placement) -> bool:
    """Return whether one replica of the model goes back and forth over the devices, as in a V or a wave."""
    return placement.replicas == 1 and not placement.is_round_robin


FIRST_OR_LAST = (
    "it counts the layers of all chunks of the first or last pipeline rank, and in this placement a rank holds other stages; "
    f"say what each stage holds by --{layout.FLAG}"
)
_REFUSED: tuple[tuple[tuple[str, ...], Callable[[Placement], bool], str], ...] = (
    (layout.FIRST_OR_LAST, is_folded, FIRST_OR_LAST),
    (
        ("iterations-to-skip",),
        lambda placement: known_chunks(placement) > 1,
        "Megatron skips batches of one data iterator per rank only, and here every model chunk has its own; drop it, or take a "
        "schedule with one model chunk per rank, such as zb-h1",
    ),
    (
        ("full-validation",),
        lambda placement: known_chunks(placement) > 1,
        "Megatron measures the validation data of every model chunk, and chunks within the model have none; pass --eval-iters, "
        "or take a schedule with one model chunk per rank, such as zb-h1",
    ),
    (
        ("multiple-validation-sets",),
        lambda placement: known_chunks(placement) > 1,
        "Megatron takes the iterators of the model chunks for those of the validation sets; drop it, or take a schedule with "
        "one model chunk per rank, such as zb-h1",
    ),
    (
        ("logits-save-dir", "logits-load-dir"),
        lambda placement: True,
        "Megatron looks for logits on every pipeline rank, and the last stage alone has them; train without a pipeline",
    ),
    (
        ("inprocess-restart",),
        lambda placement: True,
        "what the schedule set up for the failed attempt, channels above all, would outlive it; drop it, and let the launcher "
        "start ranks anew (torchrun --max-restarts)",
    ),
    (
        ("perform-rl-step",),
        lambda placement: is_folded(placement) or placement.replicas > 1,
        "generation looks for the model's last stage on the last pipeline rank, and here it is elsewhere; take a schedule of "
        "linear or interleaved placement",
    ),
)
GROUP_SIZE = "microbatch-group-size-per-virtual-pipeline-stage"
_RESHARDABLE = "dist-ckpt-optim-fully-reshardable"
_WITHOUT_EFFECT = (
    "use-ring-exchange-p2p",
    "pipeline-model-parallel-comm-backend",
    "no-overlap-p2p-communication",
    "overlap-p2p-communication-warmup-flush",
)


def _spread(flags: Flags, layers: int, stages: int) -> str:
    """Return a layout of as even stages as it goes, with multi-token prediction beside the head."""
    counts, ahead = layout.spread(layers, stages), _whole(flags.get("mtp-num-layers")) or 0
    return layout.written((*counts[:-1], counts[-1] + (ahead > 0)), ahead)


def _example(flags: Flags, layers: int | None, stages: int) -> str:
    if layers is None or layers < stages:
        return ""
    return f", for example '{_spread(flags, layers, stages)}'"


def _pass_virtual_stages(chunks: int, instead: str) -> str:
    return "leave it out" if chunks == 1 else f"pass --{VIRTUAL_STAGES} {chunks} {instead}"


def _whole(value: object) -> int | None:
    try:
        return None if value is None else int(str(value))
    except ValueError:
        return None
