"""Calls of Megatron's pipeline functions as programs that train with it make them: arguments, iterators, losses.

Each follows what the program does, in our own words: which arguments it passes, what its iterators are, what its loss
functions return, what it reads afterwards, and when it asks which stage it is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import plain_loop
import torch
from loops import descend, log_probs_of, outputs, tokens_of, without_sync
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_attr_wrapped_model

import megatron_pipemem

COUNTS = (5, 2)
"""Microbatches of every step."""
LENGTHS = (9, 16, 4, 12, 7)
FIXED = plain_loop.SEQUENCE


def sequences(count: int, fixed: bool = False) -> list[torch.Tensor]:
    lengths = (FIXED,) * count if fixed else LENGTHS[:count]
    shapes = [(1, length + 1) for length in lengths]
    return [tokens_of(10 * count + index, shape, plain_loop.VOCABULARY) for index, shape in enumerate(shapes)]


def verl(models: list, count: int, forward_only: bool) -> list:
    """A list of chunks, shapes that the messages tell, keyword arguments bound to the step, jagged results."""

    def postprocess(logits: torch.Tensor, data: dict, forward_only: bool, loss_function: Callable | None):
        log_probs = log_probs_of(logits, data["tokens"])
        loss = torch.tensor(1.0) if loss_function is None else loss_function(log_probs)
        jagged = torch.nested.as_nested_tensor([log_probs.detach()[0]], layout=torch.jagged)
        output = {"loss": loss.detach().item(), "metrics": {}, "model_output": {"log_probs": jagged}}
        return (loss if loss_function is None else loss * data["num_micro_batch"]), output

    def step(batch_iter: Iterator[dict], model: torch.nn.Module, logits_processor_func, postprocess_micro_batch_func):
        batch = next(batch_iter)
        return outputs(model, batch["tokens"]), partial(postprocess_micro_batch_func, data=batch)

    loss_function = None if forward_only else lambda log_probs: -log_probs.mean()
    batches = [{"tokens": tokens, "num_micro_batch": count} for tokens in sequences(count)]
    reports = get_forward_backward_func()(
        forward_step_func=partial(
            step,
            logits_processor_func=loss_function,
            postprocess_micro_batch_func=partial(postprocess, forward_only=forward_only, loss_function=loss_function),
        ),
        data_iterator=[iter(batches) for _ in models] if len(models) > 1 else iter(batches),
        model=models,
        num_microbatches=count,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return []
    return [
        (report["loss"], [part.tolist() for part in report["model_output"]["log_probs"].unbind()]) for report in reports
    ]


class SlimeData:
    """Read by a method of its own, with the keys that are needed; one object for all steps of a rollout."""

    def __init__(self, samples: list[torch.Tensor]):
        self.samples, self.offset = samples, 0

    def get_next(self, keys: list[str]) -> dict:
        self.offset += 1
        return {key: [self.samples[self.offset - 1]] for key in keys}


def slime(models: list, counts: tuple[int, ...], forward_only: bool) -> list:
    """Lists throughout, several calls on the same iterators, three results of a loss function or an empty loss."""
    samples = [tokens for count in counts for tokens in sequences(count)]
    data = [SlimeData(samples) for _ in models]

    def log_probs(logits: torch.Tensor, tokens: torch.Tensor):
        return torch.empty((0,)), {"log_probs": [log_probs_of(logits, tokens).detach()[0]]}

    def loss(tokens: torch.Tensor, count: int, logits: torch.Tensor):
        value = -log_probs_of(logits, tokens).mean()
        log = {"keys": ["loss"], "values": torch.stack([torch.tensor(0.0), value.detach()])}
        return value * count, torch.tensor(1), log

    reports = []
    for count in counts:

        def step(data_iterator: SlimeData, model: torch.nn.Module, return_schedule_plan: bool = False, count=count):
            assert not return_schedule_plan
            (tokens,) = data_iterator.get_next(["tokens"])["tokens"]
            output = outputs(model, tokens)
            return output, partial(log_probs, tokens=tokens) if forward_only else partial(loss, tokens, count)

        reports += get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data,
            model=models,
            num_microbatches=count,
            seq_length=FIXED,
            micro_batch_size=1,
            decoder_seq_length=FIXED,
            forward_only=forward_only,
        )
    key = "log_probs" if forward_only else "values"
    return [[part.tolist() for part in report[key]] for report in reports]


@dataclass
class NemoMicrobatch:
    input_ids: torch.Tensor


def nemo_rl(models: list, count: int, forward_only: bool) -> list:
    """One bare model and one iterator of objects, one length for all, a context around the call."""
    (model,) = models

    def step(data_iterator: Iterator[NemoMicrobatch], model: torch.nn.Module):
        tokens = next(data_iterator).input_ids

        def log_probs(logits: torch.Tensor):
            return torch.tensor(0.0), {"logprobs": log_probs_of(logits, tokens).detach()}

        def loss(logits: torch.Tensor):
            value = -log_probs_of(logits, tokens).mean()
            return value * count, {"loss": value.item()}

        return outputs(model, tokens), log_probs if forward_only else loss

    with nullcontext():
        reports = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([NemoMicrobatch(tokens) for tokens in sequences(count, fixed=True)]),
            model=model,
            num_microbatches=count,
            seq_length=FIXED,
            micro_batch_size=1,
            decoder_seq_length=FIXED,
            forward_only=forward_only,
        )
    return [report["logprobs"].tolist() if forward_only else report["loss"] for report in reports]


def ms_swift(models: list, count: int, forward_only: bool) -> list:
    """Endless iterators, labels on the last stage alone, a loss per token, numbers that are summed when they are logged."""

    def loss(losses: torch.Tensor):
        total = torch.stack([losses.sum(), torch.tensor(float(losses.numel()))])
        return total[0].clone(), total[1].detach().clone().to(torch.int), {"loss": total.detach().clone()}

    def step(data_iterator: Iterator[torch.Tensor], model: torch.nn.Module):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        is_last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        return outputs(model, next(data_iterator), labels=is_last), loss

    iterators = [cycle(sequences(max(COUNTS), fixed=True)) for _ in models]
    reports = []
    for _ in range(2 if forward_only else 1):
        reports += get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models,
            num_microbatches=count,
            seq_length=FIXED,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return [report["loss"].tolist() for report in reports]


SHAPES = {"verl": verl, "slime": slime, "nemo_rl": nemo_rl, "ms_swift": ms_swift}


def train(case: dict) -> dict:
    """Steps of log-probabilities and of training; the results of all."""
    shape, chunks = SHAPES[case["program"]], case["chunks"]
    config = plain_loop.make_config(chunks or 1, ddp=True, variable=shape in (verl, slime))
    config.calculate_per_token_loss = shape is ms_swift
    # Of all models that these ranks build; Megatron lets a process choose once.
    config.attention_backend = AttnBackend.unfused
    models = build(config, chunks, case["placed"])
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = without_sync(models)
    seen = []
    for count in (COUNTS,) if shape is slime else COUNTS:
        seen.append(shape(models, count, forward_only=True))
        for model in models:
            model.zero_grad_buffer()
        seen.append(shape(models, count, forward_only=False))
        descend(models)
    return {"seen": seen}


def build(config, chunks: int | None, placed: bool) -> list:
    """Chunk by chunk, as verl, ms-swift and mbridge do it."""
    models = []
    with megatron_pipemem.place_model_chunks() if placed else nullcontext():
        for vp_stage in range(chunks) if chunks else [None]:
            chunk = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
            ends = {
                "pre_process": mpu.is_pipeline_first_stage(**chunk),
                "post_process": mpu.is_pipeline_last_stage(**chunk),
            }
            models.append(plain_loop.build_chunk(config, False, **ends, vp_stage=vp_stage))
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), model) for model in models]
