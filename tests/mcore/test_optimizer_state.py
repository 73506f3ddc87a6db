"""Parameters' places in what is saved of the distributed optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_pipemem.mcore import optimizer_state


def test_padding_of_the_buckets_before_is_left_out():
    """Three buckets, with 28 and 100 elements of padding and with none."""
    sizes = [(128, 100), (128, 28), (64, 64)]
    buckets = [SimpleNamespace(grad_data=torch.empty(all_), numel_unpadded=used) for all_, used in sizes]
    places = {"a": (0, 64, 0), "b": (64, 100, 0), "c": (128, 156, 1), "d": (256, 320, 2)}
    found = optimizer_state.places_without_padding(SimpleNamespace(buckets=buckets, param_index_map=places))
    assert found == {"a": (0, 64, 0), "b": (64, 100, 0), "c": (100, 128, 1), "d": (128, 192, 2)}


def test_a_megatron_that_does_it_itself_is_left_alone(monkeypatch):
    for version, count in (("0.19.2+397a8e4", 1), ("0.19.2", 1), ("0.19.3", 0), ("0.20.0", 0)):
        monkeypatch.setattr(optimizer_state, "megatron_version", lambda version=version: version)
        assert len(optimizer_state.ReshardableState().replacements()) == count
