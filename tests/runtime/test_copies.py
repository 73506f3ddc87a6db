"""Sums over copies of a stage that stand on one device; those on two are in ``end_to_end/test_bidirectional.py``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from megatron_pipemem.runtime.copies import CopySums  # noqa: E402
from megatron_pipemem.schedule.placement import Placement  # noqa: E402


def test_the_middle_device_of_an_odd_number_adds_by_itself():
    placement = Placement.bidirectional(3)
    assert [placement.holders(stage) for stage in range(3)] == [(0, 2), (1,), (0, 2)]
    gradients = {
        1: [torch.tensor([1.0, 2.0]), torch.tensor([3.0])],
        4: [torch.tensor([10.0, 20.0]), torch.tensor([30.0])],
    }
    sums = CopySums(placement, 1, {}, gradients.__getitem__)
    sums.post(4)
    assert gradients[1][1] == 3, "the other copy has not all its gradients yet"
    sums.post(1)
    for stage in (4, 1):
        sums.wait(stage)
    for copy in gradients.values():
        assert [tensor.tolist() for tensor in copy] == [[11.0, 22.0], [33.0]]
