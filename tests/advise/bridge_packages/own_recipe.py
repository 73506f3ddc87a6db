"""A user's recipe: a model in a folder of Hugging Face, whose sizes Megatron-Bridge reads itself."""

from __future__ import annotations

import os

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common


def small_llama():
    config = _pretrain_common()
    config.model = AutoBridge.from_hf_pretrained(os.environ["MODEL_FOLDER"]).to_megatron_provider(load_weights=False)
    config.model.pipeline_model_parallel_size = 2
    config.model.seq_length = 32
    config.train.global_batch_size = 8
    config.train.micro_batch_size = 1
    return config
