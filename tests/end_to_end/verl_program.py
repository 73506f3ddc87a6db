"""verl's training worker computes log-probabilities and trains by PPO's loss a small model from a folder of Hugging Face.

The batches, the microbatches, the packing, the loss, the optimizer and the export of weights are verl's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from types import SimpleNamespace

import consumer_models
import loops
import sitecustomize
import torch

# Launchers, and what generates samples: the worker imports it and does not call it.
sitecustomize.answer_for("ray", "hydra", "peft", "verl.checkpoint_engine", "verl.workers.rollout")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensordict import NonTensorData, TensorDict
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode
    from verl.workers.config import (
        HFModelConfig,
        McoreActorConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

SAMPLES, STEPS, TOKENS = 6, 2, 40
"""Samples of a batch, batches, and the most tokens of a microbatch."""


def train(case: dict) -> dict:
    """Return the log-probabilities and metrics of every step on the last rank, and a hash of the weights."""
    worker = _worker(case)
    seen = []
    for step in range(STEPS):
        output = worker.infer_batch(_batch(step, compute_loss=False, global_token_num=NonTensorData([1] * SAMPLES)))
        if output is not None:
            seen.append([sample.tolist() for sample in output["log_probs"].unbind()])
        output = worker.train_mini_batch(_batch(step, mini_batch_size=3, dataloader_kwargs={"shuffle": False}))
        if output is not None:
            metrics = tensordict_utils.get(output, "metrics")
            seen.append({name: repr(value) for name, value in metrics.items() if not name.startswith(("perf/", "mfu"))})
    exported = {name: value.float().numpy().tobytes() for name, value in worker.engine.get_per_tensor_param()[0]}
    return {"seen": seen, "trained": sha256(b"".join(exported[name] for name in sorted(exported))).hexdigest()}


def _worker(case: dict) -> TrainingWorker:
    model = HFModelConfig(path=case["weights"], load_tokenizer=False)
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=case["ranks"],
        virtual_pipeline_model_parallel_size=case["chunks"],
        max_token_len_per_gpu=TOKENS,
        infer_max_token_len_per_gpu=TOKENS,
        override_transformer_config={"apply_rope_fusion": False, **dict.fromkeys(loops.FUSED, False)},
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=McoreOptimizerConfig(lr=1e-2, total_training_steps=2 * STEPS, clip_grad=1000.0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    actor = McoreActorConfig(ppo_mini_batch_size=3, ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    worker.reset()
    return worker


def _batch(step: int, **settings: object) -> TensorDict:
    generator = torch.Generator().manual_seed(step)

    def drawn(make: Callable, lengths: list[int]) -> torch.Tensor:
        return _jagged([make(length) for length in lengths])

    prompts, answers = (torch.randint(*ends, (SAMPLES,), generator=generator).tolist() for ends in ((2, 6), (3, 12)))
    lengths = [sum(both) for both in zip(prompts, answers, strict=True)]
    tokens = [torch.randint(1, consumer_models.VOCABULARY, (length,), generator=generator) for length in lengths]
    ones = drawn(partial(torch.ones, dtype=torch.long), answers)
    tensors = {
        "input_ids": _jagged(tokens),
        "position_ids": drawn(torch.arange, lengths),
        "prompts": _jagged([sample[:length] for sample, length in zip(tokens, prompts, strict=True)]),
        "responses": _jagged([sample[length:] for sample, length in zip(tokens, prompts, strict=True)]),
        "response_mask": ones,
        "loss_mask": ones,
        "advantages": drawn(partial(torch.randn, generator=generator), answers),
        "old_log_probs": drawn(lambda length: -4 * torch.rand(length, generator=generator), answers),
    }
    common = {"temperature": 1.0, "pad_mode": DatasetPadMode.NO_PADDING, "calculate_entropy": True}
    return tensordict_utils.get_tensordict(tensors, common | {"global_batch_size": SAMPLES} | settings)


def _jagged(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(samples, layout=torch.jagged)
