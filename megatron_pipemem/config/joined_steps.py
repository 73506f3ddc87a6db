"""Say what joins the ranks of a run after every step, whatever the schedule does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_JOINED: Sequence[tuple[Callable[[Callable[[str], Any]], object], str]] = (
    (
        lambda of: int(of("log_interval") or 0) == 1,
        "with --log-interval 1 every step is logged, and a step that is logged ends on all ranks together; pass "
        "--log-interval 10, for example",
    ),
    (
        lambda of: int(of("timing_log_level") or 0) > 0 and of("barrier_with_L1_time"),
        "with --timing-log-level 1 or 2 timers begin on all ranks together; add --no-barrier-with-level-1-timing",
    ),
    (
        lambda of: of("exit_duration_in_mins"),
        "with --exit-duration-in-mins all ranks tell each other after every step whether it is time; end the run by "
        "--exit-interval or a signal",
    ),
    (
        lambda of: of("num_experts"),
        "with experts the loop sums up their losses over all ranks after every step, to log them",
    ),
    (
        lambda of: of("mtp_num_layers"),
        "with multi-token prediction the loop sums up its losses over all ranks after every step, to log them",
    ),
    (
        lambda of: of("sft") or of("dataloader_inter_document_masking"),
        "with packed sequences the loop counts their tokens over all ranks after every step, to log FLOPs",
    ),
)


def joined_anyway(value_of: Callable[[str], Any]) -> list[str]:
    """Return, a sentence each, what joins the ranks of a run after every step, so that it gains nothing without a barrier.

    Args:
        value_of: of an argument of Megatron's training loop; ``None`` for one that it does not have.
    """
    return [sentence for joins, sentence in _JOINED if joins(value_of)]
