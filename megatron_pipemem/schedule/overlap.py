"""Check what a user asks of steps without a barrier between them."""

from __future__ import annotations

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.features.windows import updates_per_batch
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.request import Request


def check_overlaps(schedule: str, request: Request, weighs: bool) -> None:
    """Check a schedule by the name that the user gave, and what is asked of it.

    Args:
        schedule: its name.
        request: what is asked of it.
        weighs: whether every step is planned for the weights of its own microbatches.

    Raises:
        UnsupportedError: steps of this schedule cannot follow each other without a barrier.
    """
    if schedule == STOCK:
        raise UnsupportedError(
            "not-for-stock",
            "--pipemem-overlap-steps is for schedules of this package, and stock is Megatron's own; leave one of them out",
        )
    if request.is_asynchronous:
        check_delays(schedule)
    for asked, sentence in (
        (
            request.cuts_vocabulary,
            "all ranks compute every microbatch's logits together; pass --pipemem-vocab-parallel off",
        ),
        (request.may_offload, "activations on the host are accounted for by whole steps; pass --pipemem-offload off"),
        (
            request.replicas > 1,
            "the two replicas of the model add up their gradients when all ranks have ended the step; take a schedule with "
            "one, like zbv",
        ),
        (weighs, "all ranks agree on an order of the microbatches before every step; drop --pipemem-microbatch-costs"),
    ):
        if asked:
            raise UnsupportedError(
                "no-overlap", f"steps of {schedule} do not go without a barrier between them: {sentence}"
            )


def check_delays(name: str) -> None:
    """Check that batches of an asynchronous family can follow each other without a barrier.

    Raises:
        UnsupportedError: they cannot.
    """
    if not updates_per_batch(name):
        raise UnsupportedError(
            "conflicting-features",
            f"schedule {name!r} updates after every microbatch, and not once per step, which ranks could delay; drop "
            "--pipemem-overlap-steps, or take pipedream-2bw",
        )
