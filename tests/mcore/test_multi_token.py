"""Multi-token prediction: gradients of weights that are used several times, rolled labels, Megatron's losses of cut heads."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.models.gpt import gpt_model  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer import multi_token_prediction as stock  # noqa: E402

from megatron_pipemem.config.refusals import ASYNCHRONOUS, SPLIT_BACKWARD, VOCABULARY  # noqa: E402
from megatron_pipemem.errors import UnsupportedError  # noqa: E402
from megatron_pipemem.features.vocabulary.megatron.step import _swapped, weigh  # noqa: E402
from megatron_pipemem.features.vocabulary.runtime.passes import Batch  # noqa: E402
from megatron_pipemem.mcore import refusals  # noqa: E402
from megatron_pipemem.mcore.model.linear import split_linear  # noqa: E402
from megatron_pipemem.mcore.model.multi_token import logged_before, split_embedding  # noqa: E402
from megatron_pipemem.mcore.model.placement import _tied_weights  # noqa: E402
from megatron_pipemem.mcore.refusals import check_chunks, check_config, check_sharing  # noqa: E402
from megatron_pipemem.mcore.step.forward_backward import _message_shape  # noqa: E402
from megatron_pipemem.mcore.step.losses import sum_depths  # noqa: E402
from megatron_pipemem.runtime.weight_gradients import (  # noqa: E402
    EARLY,
    GRADIENT_READY,
    ImmediateWeightGradients,
    WeightGradientQueue,
    collecting,
)
from megatron_pipemem.schedule.placement import Placement  # noqa: E402


class OneRank:
    """A tensor-parallel group of one."""

    def size(self):
        return 1

    def rank(self):
        return 0


class Embedding:
    """As much of Megatron's as its forward asks for."""

    tp_group = OneRank()
    reduce_scatter_embeddings = deterministic_mode = False
    gtp_remat_size = 1

    def __init__(self, weight):
        self.weight = weight


def trained(linear, embed, queue, early=False) -> tuple[torch.nn.Parameter, list[torch.Tensor]]:
    """A weight after two microbatches in which it embeds and is the head of two depths; it is told what is reported."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.nn.Parameter(torch.randn(7, 4, generator=generator))
    weight.shared = True
    if early:
        setattr(weight, EARLY, True)
    reported = []

    def take():
        reported.append(weight.grad)
        weight.grad = None

    setattr(weight, GRADIENT_READY, take)
    for _ in range(2):
        tokens = torch.randint(7, (2, 3), generator=generator)
        with collecting(queue):
            x = embed(Embedding(weight), tokens)
            for _ in range(2):
                x = linear(x, weight, None, False, False, False, tp_group=OneRank()) @ weight.detach()
            x.square().sum().backward()
        if type(queue) is WeightGradientQueue and not early:
            assert weight.grad is None
            queue.run()
        else:
            take()
    return weight, reported


@pytest.mark.parametrize(
    ("queue", "early"),
    [(WeightGradientQueue(), False), (WeightGradientQueue(), True), (ImmediateWeightGradients(), False)],
)
def test_a_weight_that_is_used_several_times_is_reported_once_with_autograds_own_sum(queue, early):
    linear = layers.linear_with_grad_accumulation_and_async_allreduce
    embed = layers.VocabParallelEmbedding.forward
    _, wanted = trained(linear, embed, None)
    _, found = trained(partial(split_linear, linear), partial(split_embedding, embed), queue, early)
    assert len(found) == len(wanted) == 2
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_labels_of_all_depths_are_megatrons():
    labels = torch.arange(1, 13).view(1, 2, 6)
    batch = Batch(labels + 100, labels, looks_ahead=True, depths=2)
    rolled = [labels[0]]
    for _ in range(2):
        rolled.append(stock.roll_tensor(rolled[-1].clone())[0])
    assert batch.empty_for_head(0, 5, dtype=torch.float32).shape == (18, 2, 5)
    assert torch.equal(batch.labels_of(0), torch.cat(rolled, dim=1).t())
    assert batch.tokens_of(0).shape == (2, 7) and batch.tokens_of(0)[:, -1].tolist() == [0, 0]


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_of_a_cut_head_are_weighed_and_logged_as_of_a_whole_one(monkeypatch, per_token):
    monkeypatch.setattr(stock.parallel_state, "get_data_parallel_group", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    generator = torch.Generator().manual_seed(2)
    s, b, h, words, depths = 6, 2, 4, 3, 2
    config = SimpleNamespace(
        mtp_num_layers=depths, mtp_loss_scaling_factor=0.3, calculate_per_token_loss=per_token, mtp_detach_heads=False
    )
    head = torch.randn(words, h, generator=generator)
    labels = torch.randint(words, (b, s), generator=generator)
    mask = (torch.rand(b, s, generator=generator) < 0.7).float()
    x = torch.randn((1 + depths) * s, b, h, generator=generator)

    def cross_entropy(labels, logits):
        return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

    others = {
        "labels": labels,
        "loss_mask": mask,
        "output_weight": None,
        "runtime_gather_output": None,
        "is_training": True,
        "compute_language_model_loss": cross_entropy,
        "config": config,
    }

    def backward(first_losses: torch.Tensor) -> dict[str, torch.Tensor]:
        (first_losses * mask.t()).sum().backward()
        return {name: value.clone() for name, value in stock.MTPLossLoggingHelper.tracker.items() if "values" in name}

    whole = x.clone().requires_grad_()
    with logged_before():
        main = stock.process_mtp_loss(
            hidden_states=whole, output_layer=lambda rows, **_: (rows @ head.t(), None), **others
        )
        wanted = backward(cross_entropy(labels, main @ head.t()).t())
    cut = x.clone().requires_grad_()
    logits = cut @ head.t()
    rolled = Batch(labels[None], labels[None], True, depths).labels_of(0)
    losses = cross_entropy(rolled.t(), logits).t()
    with logged_before():
        found = backward(weigh(stock.process_mtp_loss, others, losses, logits.argmax(-1) == rolled))
    assert stock.MTPLossLoggingHelper.tracker == {}
    assert wanted["correct_values"].sum() > 0 and wanted["loss_values"].min() > 0
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    torch.testing.assert_close(cut.grad, whole.grad)


def test_the_function_that_is_replaced_is_the_one_that_models_call():
    assert gpt_model.process_mtp_loss is stock.process_mtp_loss


def test_rows_of_depths_and_ranks_change_places():
    rows = torch.arange(12)
    assert _swapped(rows, 2, 3).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert torch.equal(_swapped(_swapped(rows, 2, 3), 3, 2), rows)


class Model:
    def __init__(self, pre_process=False, post_process=False, tied=False, further=False):
        self.pre_process, self.post_process, self.mtp_process = pre_process, post_process, further
        self.share_embeddings_and_output_weights = tied

    def shared_embedding_or_output_weight(self):
        return self


@pytest.mark.parametrize(("tied", "further"), [(True, False), (True, True), (False, True)])
def test_a_device_with_both_ends_has_two_copies_of_the_embedding(tied, further):
    first, last = Model(pre_process=True, tied=tied), Model(post_process=True, tied=tied, further=further)
    assert _tied_weights([first, last]) == [(first, last)]
    assert _tied_weights([first, Model()]) == _tied_weights([Model(), last]) == []


def test_untied_ends_have_nothing_in_common():
    assert _tied_weights([Model(pre_process=True), Model(post_process=True)]) == []


def test_losses_of_depths_are_summed_over_a_pipeline_that_ends_elsewhere(monkeypatch):
    monkeypatch.setattr(stock.MTPLossLoggingHelper, "tracker", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config, groups = SimpleNamespace(mtp_num_layers=2), SimpleNamespace(dp_cp="data")

    def settle(placement):
        pipeline = SimpleNamespace(placement=placement, group="pipeline")
        step = SimpleNamespace(context=SimpleNamespace(config=config), pipeline=pipeline, groups=groups)
        sum_depths(step)

    settle(Placement.linear(4))
    assert stock.MTPLossLoggingHelper.tracker == {}
    settle(Placement.v_shape(4))
    tracker = stock.MTPLossLoggingHelper.tracker
    assert (tracker["reduce_group"], tracker["avg_group"]) == ("pipeline", "data")
    assert tracker["loss_values"].tolist() == [0, 0]


def test_messages_behind_a_standalone_stage_have_any_shape():
    config = SimpleNamespace(variable_seq_lengths=False, mtp_standalone=True)
    assert _message_shape(8, 1, None, config, None, None) is None


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


@pytest.mark.parametrize(
    ("attribute", "refused", "words"),
    [
        ("mtp_standalone", VOCABULARY, "--pipeline-model-parallel-layout"),
        ("mtp_detach_heads", VOCABULARY, "--mtp-detach-heads"),
        ("mtp_num_layers", ASYNCHRONOUS, "--mtp-num-layers"),
        ("mtp_use_repeated_layer", SPLIT_BACKWARD, "--mtp-use-repeated-layer"),
    ],
)
def test_what_multi_token_prediction_does_not_go_with_names_the_flag(attribute, refused, words):
    with pytest.raises(UnsupportedError, match=f"{attribute}.*{words}"):
        check_config(SimpleNamespace(**{attribute: 1}), refused)
