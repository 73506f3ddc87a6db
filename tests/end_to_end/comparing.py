"""Comparisons of a run under one of our schedules with the same run under stock's."""

from __future__ import annotations

import pytest
from quickstart import ROUNDING

NORM_ROUNDING = 2e-5
"""A norm is a further sum: stock's own, in fp32, is 2e-6 off the norm of the same gradients in float64, and a third step
adds to that."""


def assert_same_training(run, stock) -> None:
    """Compare losses to the bit. The gradient norm's last bits group partial sums by placement.

    This is for runs that add the same numbers in the same order as stock does, which gives equal bits on every processor. Two
    replicas of the model, a cut vocabulary, slices and reordered microbatches add in another order. Their bits can be equal
    with the kernels of one processor and differ with those of another: ``assert_close_training``.
    """
    assert len(set(stock.losses)) > 1
    assert bits(run.losses) == bits(stock.losses)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=5e-7)
    assert run.validation == stock.validation


def assert_close_training(run, stock, within: float = ROUNDING, norms: float = NORM_ROUNDING) -> None:
    """Compare losses of runs that add the same numbers in another order, by default within what the documents promise."""
    assert len(set(stock.losses)) > 1
    assert run.losses == pytest.approx(stock.losses, rel=within)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=norms)
    for evaluated, wanted in zip(run.validation, stock.validation, strict=True):
        assert evaluated == pytest.approx(wanted, rel=within)


def assert_close_gradients(run, stock, within: float = 1e-6) -> None:
    """Compare every parameter's gradient of the first step with its own size."""
    assert run.gradients.keys() == stock.gradients.keys()
    off = {name: (run.gradients[name] - wanted).norm() / wanted.norm() for name, wanted in stock.gradients.items()}
    assert {name: float(share) for name, share in off.items() if not share <= within} == {}


def assert_predicted_bytes(run, exact: bool = True) -> None:
    """Compare each rank's peak with its prediction: to the byte, or with the range that routing leaves."""
    assert run.ranks and all(peak > 0 for peak in run.counted_peaks)
    if exact:
        assert run.predicted_peaks == run.counted_peaks
        return
    for rank in run.ranks:
        least, most, counted = (rank[f"{name}_peak_bytes"] for name in ("predicted_least", "predicted", "counted"))
        assert least <= counted <= most


def bits(losses: list[float]) -> list[str]:
    return [loss.hex() for loss in losses]
