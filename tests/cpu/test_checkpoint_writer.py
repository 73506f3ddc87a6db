"""What is written in the background is what was there when the save began."""

from __future__ import annotations

import torch

from megatron_pipemem.cpu.upstream import _copied


def test_training_does_not_change_what_is_to_be_written():
    weight = torch.ones(3)
    plan = [("file", "key", ([("bytes", b"x")], [("item", weight)]))]
    ((file, key, (data, ((item, tensor),))),) = _copied(plan)
    weight.zero_()
    assert (file, key, data, item) == ("file", "key", [("bytes", b"x")], "item")
    assert tensor.tolist() == [1, 1, 1]
