"""Options that only Megatron's branches ``main`` and ``dev`` have: ``scripts/contracts.sh`` runs these tests on them."""

from __future__ import annotations

import pytest
from megatron.core.transformer import TransformerConfig
from model_flags import EVALUATION, MULTI_TOKEN, PP2, RECOMPUTED, SELECTIVE, TP_AND_SP, UNTIED, VOCABULARY, hybrid

from megatron_pipemem.mcore.symbols import SELECT_SEGMENT_OF_GROUPS

RECOMPUTE_STREAMS = (*SELECTIVE, "--recompute-modules", "mhc")


def of_branch(option: str, branch: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(TransformerConfig, option), reason=f"only Megatron's {branch} has {option}")


STREAMS = (
    *("--enable-hyper-connections", "--num-residual-streams", "3"),
    # Megatron's command line gives the streams to models with experts only. Here no layer has any.
    *("--disable-bias-linear", "--num-experts", "2", "--moe-layer-freq", "([0]*8)"),
)


@of_branch("enable_hyper_connections", "dev")
class TestResidualStreams:
    """mHC: stages exchange three streams per token."""

    @pytest.mark.parametrize(
        ("schedule", "flags"),
        [
            ("zb-h1", ()),
            ("v-half", EVALUATION),
            ("interleaved", ()),
            ("zb-h1", RECOMPUTE_STREAMS),
            ("v-half", ("--bf16", *RECOMPUTE_STREAMS)),
            ("zb-h1", (*PP2, *TP_AND_SP)),
        ],
    )
    def test_trains_as_stock(self, train, equals_stock, schedule, flags):
        equals_stock(schedule, *STREAMS, *flags, train=train)

    def test_offload_frees_what_is_predicted(self, train, equals_stock):
        equals_stock("zbv", *STREAMS, ours=("--pipemem-offload", "full"), train=train)

    def test_a_cut_vocabulary_has_one_stream(self, train, equals_stock):
        equals_stock("v-half", *STREAMS, UNTIED, ours=(VOCABULARY, "2"), close=True, train=train)


# DeepSeek-V4's layers: a window of tokens, and blocks of 4 of which an indexer chooses, or all blocks of 128. The indexer
# computes in bf16.
COMPRESSED = (
    *("--experimental-attention-variant", "dsv4_hybrid", "--csa-compress-ratios", "([0,4,128,4]*2)"),
    *("--csa-window-size", "16", "--dsa-kernel-backend", "none", "--bf16", "--seq-length", "128"),
    *("--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "16", "--dsa-indexer-topk", "8"),
    *("--dsa-indexer-loss-coeff", "0.01", "--o-groups", "2", "--o-lora-rank", "16", "--max-position-embeddings", "128"),
    *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "8", "--qk-head-dim", "8"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--normalization", "RMSNorm", "--qk-layernorm"),
    *("--position-embedding-type", "rope", "--disable-bias-linear"),
)


@of_branch("csa_compress_ratios", "dev")
@pytest.mark.parametrize(
    ("schedule", "flags"), [("zb-h1", ()), ("v-half", ()), ("v-half", STREAMS), ("zb-h1", STREAMS)]
)
def test_compressed_attention_trains_as_stock(train_with_transformer_engine, equals_stock, schedule, flags):
    equals_stock(schedule, *COMPRESSED, *flags, train=train_with_transformer_engine)


GROUPS = SELECT_SEGMENT_OF_GROUPS.of


@pytest.mark.skipif(GROUPS.find() is None, reason="only Megatron's pull request 4942 has groups of layers")
@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_groups_of_layers_train_as_stock(equals_stock, schedule):
    equals_stock(schedule, *hybrid("[*-]*-[*-]*-"))


@of_branch("mtp_hsm", "main")
@pytest.mark.parametrize("ours", [(), RECOMPUTED])
def test_mixed_hidden_states_draw_the_same_again(train, equals_stock, ours):
    """Multi-token prediction draws from a random stream of its own, which recomputation has to repeat."""
    equals_stock("zb-h1", *MULTI_TOKEN, "--mtp-hsm", ours=ours, train=train)
