"""Define the ``--pipemem-*`` flags: their names and what they mean. ``mcore.flags`` acts on them."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_pipemem.config.cluster import DEFAULT_HOST_SHARE
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.slices import SLICE_CUTS
from megatron_pipemem.schedule.options import (
    EARLY_WEIGHTS,
    MESSAGE_SHAPES,
    OFFLOAD,
    RANDOM,
    RECOMPUTE,
    VOCABULARY,
    WEIGHT_INPUTS,
)

_FLAGS: dict[str, dict[str, Any]] = {
    "--pipemem-schedule": dict(metavar="NAME|FILE.csv|auto|stock", help="which schedule to run"),
    "--pipemem-schedule-module": dict(
        metavar="FILE.py|package.module", help="add the schedules of a Python file or module, so that one can be named"
    ),
    "--pipemem-memory-cap": dict(
        metavar="X|XGiB|XMiB|XB|X,X,...",
        help="the most a rank may hold: activation units, or, with auto, bytes of activations; one for all pipeline ranks, or "
        "one each",
    ),
    "--pipemem-costs": dict(
        metavar="unit|profile|FILE", help="what passes take: equal, measured in the run, or as the JSON file says"
    ),
    "--pipemem-offload": dict(
        metavar="|".join(OFFLOAD),
        help="which activations wait on the host for their backward, beside what the schedule itself says",
    ),
    "--pipemem-host-memory": dict(
        metavar="XGiB",
        help=f"host memory per node for that, shared by its ranks (default: {DEFAULT_HOST_SHARE:g} of what is available)",
    ),
    "--pipemem-recompute": dict(
        metavar="|".join(RECOMPUTE),
        help="what runs again before its backward: of every stage what is cheap (norms, activation functions, unfused "
        "attention), or all; auto: whatever of these a memory cap needs, per stage",
    ),
    "--pipemem-offload-option": dict(
        metavar="KEY=VALUE", action="append", help="ratio, min_bytes, guard, switches, and bandwidth for CPU ranks"
    ),
    "--pipemem-trace": dict(metavar="DIR", help="write timelines of plan and run"),
    "--pipemem-report": dict(metavar="FILE", help="write predicted and counted bytes, bubbles, losses"),
    "--pipemem-vocab-parallel": dict(
        metavar="|".join(VOCABULARY),
        help="cut embedding and LM head over the pipeline's ranks, by Algorithm 1 (two barriers, two microbatches more in "
        "flight) or Algorithm 2 (one barrier, one microbatch more) of arXiv 2411.05288; auto: whichever of the three the "
        "model's sizes and layout, the costs and the cap call for",
    ),
    "--pipemem-vocab-piece-tokens": dict(
        metavar="N",
        type=int,
        help="compute the cut head's logits for N tokens at a time, which bounds what they take in fp32 (default: all)",
    ),
    "--pipemem-weight-inputs": dict(
        metavar="|".join(WEIGHT_INPUTS),
        help="what waits for W of tensors that sequence parallelism gathers: sharded: this rank's shards, which W gathers "
        "again; gathered: the whole tensors; auto (default): sharded where the tensor-parallel ranks are of one node",
    ),
    "--pipemem-early-weights": dict(
        metavar=f"auto|none|{','.join(EARLY_WEIGHTS)}",
        help="modules whose weight gradients are computed in I, so that nothing of theirs waits for W; auto (default): the "
        "second matrix of experts that are narrower than the model",
    ),
    "--pipemem-single-queue": dict(
        action="store_true",
        help="order what a rank launches for one hardware queue, as is done anyway on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=1, "
        "and in the first steps on every GPU",
    ),
    "--pipemem-random": dict(
        metavar="|".join(RANDOM),
        help="what first weights and dropout depend on: stock: Megatron's streams of every rank; layerwise: the seed, the "
        "iteration, the microbatch and the layer alone, so that every schedule, stock included, trains the same from step 0",
    ),
    "--pipemem-message-shapes": dict(
        metavar="|".join(MESSAGE_SHAPES),
        help="how ranks learn the shapes of messages under variable_seq_lengths: step: all of a step at its start, from the "
        "tokens that the first stage passes to the model; message: each from a header, which every receive waits for",
    ),
    "--pipemem-microbatch-costs": dict(
        metavar="FLOPs|tokens|FILE.json|module:function",
        help="what microbatches cost that are not alike (packed or long documents): every training step then runs them in the "
        "order, and by the schedule, that suit them; a function takes what the data iterator yields",
    ),
    "--pipemem-slice-cut": dict(
        metavar="|".join(SLICE_CUTS),
        help="how sequences are cut where the schedule has slices: tokens: slices of equally many tokens; flops: slices whose "
        "forwards take equally many FLOPs, since later ones attend to more keys (default: tokens)",
    ),
    "--pipemem-overlap-steps": dict(
        action="store_true",
        help="let every rank begin a step as soon as it has done its own part of the one before: no rank waits for another one "
        "between steps, and training stays the same to the bit",
    ),
    "--pipemem-option": dict(metavar="KEY=VALUE", action="append", help="option of the schedule"),
}
"""All flags but that of ``plan_parser``: what argparse is told of each."""


class Parser(argparse.ArgumentParser):
    """A parser of flags among others. Raises UnsupportedError where argparse would print all flags and end the process."""

    def __init__(self, **settings: Any):
        super().__init__(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS, **settings)

    def error(self, message: str):
        raise UnsupportedError("unknown-flag", f"{message}; pipemem run --help lists the --pipemem-* flags")


def plan_parser() -> Parser:
    """Return a parser of the flag that stands for others, which is read first."""
    parser = Parser()
    parser.add_argument(
        "--pipemem-plan",
        metavar="FILE",
        help="add what pipemem plan --output wrote: parallelism, layout, schedule; other flags may repeat it, not contradict",
    )
    return parser


def flag_parser() -> Parser:
    """Return a parser of all flags. What is not given is not in its answer: ``Settings`` has the defaults."""
    parser = Parser(parents=[plan_parser()], argument_default=argparse.SUPPRESS)
    for name, told in _FLAGS.items():
        parser.add_argument(name, **told)
    return parser
