"""What multi-token prediction refuses. Losses and gradients: tests/end_to_end/test_multi_token.py."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import refusals
from megatron_pipemem.mcore.refusals import check_chunks, check_sharing
from megatron_pipemem.schedule.placement import Placement


def test_a_standalone_stage_is_refused_where_the_embedding_is_on_another_device():
    config = SimpleNamespace(mtp_standalone=True)
    check_sharing(config, "zb-h1", Placement.linear(4))
    with refused("unsupported-placement", "v-half", "--pipeline-model-parallel-layout", kind=UnsupportedError):
        check_sharing(config, "v-half", Placement.v_shape(4))


class TiedLast(torch.nn.Module):
    """A last stage with a copy of the embedding, and a head of its own that nobody uses."""

    pre_process, post_process, mtp_process, share_embeddings_and_output_weights = False, True, True, True

    def __init__(self, weight):
        super().__init__()
        self.output_layer = SimpleNamespace(weight=weight)


def test_a_tied_model_is_refused_where_checkpoints_are_kept(monkeypatch):
    whole, cut = TiedLast(torch.ones(1)), TiedLast(None)
    check_chunks([whole], 1, "zb-h1")
    monkeypatch.setattr(refusals, "keeps_checkpoints", lambda: True)
    check_chunks([cut], 1, "zb-h1")
    with refused("tied-embedding", "--untie-embeddings-and-output-weights", kind=UnsupportedError):
        check_chunks([whole], 1, "zb-h1")
