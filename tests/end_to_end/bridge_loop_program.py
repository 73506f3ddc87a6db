"""Megatron-Bridge trains by its own loops, as a recipe says, a small model from a folder of Hugging Face."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module

import consumer_models
import loops
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.data.base import DatasetProvider
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.transformer.enums import AttnBackend

import megatron_pipemem

SEQUENCE = 16
LOOPS = {"pretrain": pretrain, "finetune": finetune}


class Losses(Callback):
    """Writes down, to the bit, the losses that the loop tells its callbacks, on the rank that has them."""

    def __init__(self):
        self.training: list[dict] = []
        self.evaluation: list[dict] = []

    def on_train_step_end(self, context) -> None:
        self.training += _bits(context.loss_dict)

    def on_eval_end(self, context) -> None:
        self.evaluation += _bits(context.total_loss_dict)


def _bits(losses: dict | None) -> list[dict]:
    return [{name: loss.item().hex() for name, loss in losses.items()}] if losses else []


@dataclass
class Conversations(DatasetProvider):
    """Samples of other lengths: a batch is as long as its longest sample, and only answers have a loss."""

    seq_length: int = SEQUENCE

    def build_datasets(self, context) -> tuple:
        return tuple(Samples(count) for count in (context.train_samples, context.valid_samples, context.test_samples))


class Samples(torch.utils.data.Dataset):
    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, SEQUENCE - 3 * (index // 8 % 3), (), generator=generator))
        return torch.randint(1, consumer_models.VOCABULARY, (length + 1,), generator=generator)

    @staticmethod
    def collate_fn(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        tokens, labels = padded[:, :-1].contiguous(), padded[:, 1:].contiguous()
        places = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        answers = (labels != 0) & (places >= 2)
        return {"tokens": tokens, "labels": labels, "loss_mask": answers.float(), "position_ids": places}


def train(case: dict) -> dict:
    """Run a recipe with the statements that change it, and return the losses of the last rank, or of the rank that has them."""
    from_hugging_face = AutoBridge.from_hf_pretrained
    AutoBridge.from_hf_pretrained = lambda *_, **__: from_hugging_face(case["weights"])
    try:
        config = _recipe(case["recipe"])
    finally:
        AutoBridge.from_hf_pretrained = from_hugging_face
    _shrink(config, case)
    exec(case["statements"], {"config": config, "megatron_pipemem": megatron_pipemem})
    losses = Losses()
    LOOPS[case["loop"]](config, forward_step, callbacks=[losses])
    return vars(losses)


def _recipe(name: str):
    module, _, function = name.rpartition(":")
    os.environ.setdefault("MODEL_FOLDER", "")
    return getattr(import_module(module or "megatron.bridge.recipes"), function)()


def _shrink(config, case: dict) -> None:
    """Change no more of a recipe than its sizes, its precision, its data, and its files."""
    model, optimizer = config.model, config.optimizer
    model.pipeline_model_parallel_size, model.tensor_model_parallel_size = case["ranks"], 1
    config.mixed_precision = None
    for part in (model, optimizer):
        part.bf16 = part.fp16 = False
    model.params_dtype = model.pipeline_dtype = torch.float32
    model.attention_backend, model.apply_rope_fusion = AttnBackend.unfused, False
    model.cross_entropy_loss_fusion = False
    for name in loops.FUSED:
        setattr(model, name, False)
    optimizer.clip_grad, optimizer.lr, optimizer.min_lr = 0.0, 1e-2, 1e-3
    config.scheduler.lr_warmup_iters = 0
    model.seq_length = SEQUENCE
    if case["loop"] == "finetune":
        config.dataset = Conversations(dataloader_type="batch")
    config.dataset.seq_length, config.dataset.num_workers = SEQUENCE, 0
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", consumer_models.VOCABULARY - 1
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = case["steps"], 8, 1
    config.train.manual_gc = False
    config.validation.eval_interval, config.validation.eval_iters = case["steps"], 1
    config.logger.tensorboard_dir = config.checkpoint.save = config.checkpoint.load = None
    config.checkpoint.pretrained_checkpoint = case["weights"]
