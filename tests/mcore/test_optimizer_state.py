"""Parameters' places in what is saved of the distributed optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_pipemem.mcore import compat
from megatron_pipemem.mcore.compat import saves_padding
from megatron_pipemem.mcore.symbols import RESHARDABLE_STATE


def test_padding_of_the_buckets_before_is_left_out():
    """Three buckets, with 28 and 100 elements of padding and with none."""
    sizes = [(128, 100), (128, 28), (64, 64)]
    buckets = [SimpleNamespace(grad_data=torch.empty(all_), numel_unpadded=used) for all_, used in sizes]
    places = {"a": (0, 64, 0), "b": (64, 100, 0), "c": (128, 156, 1), "d": (256, 320, 2)}
    map_of_places = compat.places_without_padding(SimpleNamespace(buckets=buckets, param_index_map=places))
    assert map_of_places == {"a": (0, 64, 0), "b": (64, 100, 0), "c": (100, 128, 1), "d": (128, 192, 2)}


def test_a_megatron_that_does_it_itself_is_left_alone(monkeypatch):
    def fixed(self, model_sharded_state_dict):
        cumulative_padding_stripped = [0]
        return cumulative_padding_stripped

    assert len(compat.ReshardableState().replacements()) == saves_padding()
    monkeypatch.setattr(DistributedOptimizer, RESHARDABLE_STATE.name.split(".")[1], fixed)
    assert not saves_padding() and not compat.ReshardableState().replacements()
