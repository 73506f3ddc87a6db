"""Fine-tune Llama with Megatron-Bridge under another schedule than its recipe has.

cd examples && pipemem advise bridge:bridge_recipe:llama        # prints statements like those of change()
LLAMA=/models/Meta-Llama-3.1-70B torchrun --nnodes 4 --nproc-per-node 8 ... bridge_recipe.py
"""

from __future__ import annotations

import os

from megatron.bridge.recipes import llama31_70b_sft_config
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

import megatron_pipemem


def llama() -> ConfigContainer:
    """Return Megatron-Bridge's own recipe, with the weights to begin from."""
    config = llama31_70b_sft_config()
    config.checkpoint.pretrained_checkpoint = os.environ.get("LLAMA")
    return config


def change(config: ConfigContainer) -> None:
    """Take two chunks of the model per rank, in a V: less memory and less idle time than 1F1B."""
    megatron_pipemem.enable("v-half")
    config.model.virtual_pipeline_model_parallel_size = 2


if __name__ == "__main__":
    config = llama()
    change(config)
    finetune(config, forward_step)
