"""Transformer Engine's graphs, captured and replayed in our orders. For a process that has it on its path."""

from __future__ import annotations

import torch
import transformer_engine.pytorch.graph as te_graph
from cuda_graphs import CUDAGraph

from megatron_pipemem.mcore.step.notices import signed_chunks
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.registry import build_schedule

WIDTH, TOKENS, DEPTH = 4, 3, 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


def train(name: str, p: int, m: int, device: int) -> dict[str, int]:
    """Two steps of one device with graphs and without. Counts gradients that differ."""
    schedule = build_schedule(name, num_devices=p, num_microbatches=m)
    order, stages = schedule.orders[device], schedule.placement.stages[device]
    chunks, plain = ([[Layer() for _ in range(DEPTH)] for _ in stages] for _ in range(2))
    layers, others = ([layer for chunk in modules for layer in chunk] for modules in (chunks, plain))
    for one, other in zip(layers, others, strict=True):
        other.load_state_dict(one.state_dict())
    before = CUDAGraph.counts.copy()
    graphs = te_graph.make_graphed_callables(
        tuple(layers),
        tuple((torch.zeros(TOKENS, WIDTH, requires_grad=True),) for _ in range(len(layers) * m)),
        num_warmup_iters=1,
        allow_unused_input=True,
        _order=signed_chunks(schedule, device),
        _num_layers_per_chunk=[DEPTH] * len(stages),
        _reuse_graph_input_output_buffers=True,
    )
    for layer in layers:  # as Megatron does after a capture
        layer.zero_grad()
    given: list[torch.Tensor] = []  # gradients as a graph leaves them, and as we send them
    sent: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    at_once = 0
    for _ in range(2):
        inputs, outputs = {}, {}
        for action in order:
            chunk, microbatch = stages.index(action.stage), action.microbatch
            key = chunk, microbatch
            first = (chunk * m + microbatch) * DEPTH
            if action.kind is Kind.F:
                x = torch.randn(TOKENS, WIDTH)
                inputs[key] = h, r = x.clone().requires_grad_(), x.clone().requires_grad_()
                for number in range(DEPTH):
                    h = graphs[first + number](h)
                    r = plain[chunk][number](r)
                at_once += not torch.equal(h, r)
                outputs[key] = h, r
            else:
                (h, r), gradient = outputs.pop(key), torch.randn(TOKENS, WIDTH)
                h.backward(gradient.clone())
                r.backward(gradient)
                h, r = (tensor.grad for tensor in inputs.pop(key))
                at_once += not torch.equal(h, r)
                given.append(h)
                sent.append(h.clone())
                wanted.append(r)
    unlike = [
        not torch.equal(one.grad, other.grad)
        for layer, other_layer in zip(layers, others, strict=True)
        for one, other in zip(layer.parameters(), other_layer.parameters(), strict=True)
    ]
    counts, expected = CUDAGraph.counts - before, len(order) * DEPTH
    return {
        "wrong": at_once + sum(unlike) + sum(not torch.equal(*pair) for pair in zip(sent, wanted, strict=True)),
        "overwritten": sum(not torch.equal(*pair) for pair in zip(given, wanted, strict=True)),
        "captures": counts["captures"] - expected,
        "replays": counts["replays"] - 2 * expected,
    }


def train_all(*cases: str) -> dict[str, dict[str, int]]:
    """Return the counts of every device of every case ``family,p,m``."""
    results = {}
    for case in cases:
        family, devices, microbatches = case.split(",")
        for device in range(int(devices)):
            results[f"{case},{device}"] = train(family, int(devices), int(microbatches), device)
    return results
