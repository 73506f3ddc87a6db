"""What a rank counts of the vocabulary passes, where a backend keeps tensors longer than the passes do."""

from __future__ import annotations

import pytest
import torch

from megatron_pipemem.features.vocabulary.runtime.passes import Batch, VocabularyPasses
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement

B, S, H = 2, 3, 4
ELEMENT = 4  # bytes


@pytest.mark.parametrize(
    ("looks_ahead", "both_here", "contiguous", "kept"),
    [
        pytest.param(False, False, True, B * S * H, id="as it came"),
        pytest.param(False, False, False, B * S * H, id="copied"),
        pytest.param(True, False, True, B * (S + 1) * H, id="with a place for what comes behind the end"),
        pytest.param(True, True, True, B * (S + 1) * H, id="added to the last stage's"),
    ],
)
def test_a_gradient_that_tensor_parallel_ranks_gathered_is_counted_once(looks_ahead, both_here, contiguous, kept):
    """The backend that gathered it lets go when its thread gets there, and what is counted does not depend on that."""
    batch = Batch([torch.zeros(B, S, dtype=torch.long)], [torch.zeros(B, S, dtype=torch.long)], looks_ahead)
    ledger = ActivationLedger()
    placement = Placement("custom", (0, 1, 1, 0) if both_here else (0, 1))
    passes = VocabularyPasses(placement, 0, None, None, batch, None, trains=True, ledger=ledger)
    if both_here:
        passes._embedding_gradients[0] = passes._hold(torch.ones(B, S + 1, H))
    of_the_backend = torch.ones(B, S, H) if contiguous else torch.ones(S, B, H).transpose(0, 1)
    ledger.hold(of_the_backend)
    passes.take_embedding_gradient(0, of_the_backend)
    ledger.record(Action(Kind.I, 0, 0))
    assert ledger.peak == kept * ELEMENT
    taken = passes._embedding_gradients[0]
    assert torch.equal(taken[:, :S], torch.full((B, S, H), 1.0 + both_here))
    assert taken.is_contiguous() and taken.size(1) == S + looks_ahead
