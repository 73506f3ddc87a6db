"""Program of a process that has Transformer Engine on its path: its graphs, captured and replayed in our orders.

Every argument is ``family,p,m``, or ``mended``, which changes Transformer Engine for the cases after it. Graphs of layers
with split backwards need three changes of its ``make_graphed_callables``: a counter of W per chunk, next to ``bwd_idx``;
static inputs that W gives back, and not the backward before it; output gradients that backwards do not share, because W
reads them. Prints, as JSON, what became of every device of every case.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import te_stand_in  # noqa: F401 - before the CPU lane

from megatron_pipemem.cpu import activate

activate()

import torch  # noqa: E402
import transformer_engine.pytorch.graph as te_graph  # noqa: E402
from te_stand_in.graphs import CUDAGraph  # noqa: E402
from transformer_engine.pytorch import Linear  # noqa: E402

from megatron_pipemem.mcore.step.notices import signed_chunks  # noqa: E402
from megatron_pipemem.schedule.action import Kind  # noqa: E402
from megatron_pipemem.schedule.registry import build_schedule  # noqa: E402

WIDTH, TOKENS = 4, 3
DELAYED = {"bias": False, "delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}

# What each line of ``make_graphed_callables`` becomes, so that a W may run later than the next backward of its chunk.
MENDED = {
    "        bwd_idx = [0] * num_model_chunks\n        static_grad_outputs_dict = {}\n": (
        "        bwd_idx = [0] * num_model_chunks\n"
        "        wgrad_idx = [0] * num_model_chunks\n"
        "        static_grad_outputs_dict = {}\n"
    ),
    "            elif ceil(c_id) != c_id:\n                continue\n            else:\n                num_consumed": (
        "            elif delay_wgrad_compute and ceil(c_id) == c_id:\n"
        "                continue\n"
        "            else:\n"
        "                num_consumed"
    ),
    "if static_grad_outputs_keys in static_grad_outputs_dict:": (
        "if static_grad_outputs_keys in static_grad_outputs_dict and not delay_wgrad_compute:"
    ),
    "per_callable_bwd_idx -= _num_layers_per_chunk[m_chunk]": (
        "per_callable_bwd_idx += (wgrad_idx[m_chunk] - bwd_idx[m_chunk]) * _num_layers_per_chunk[m_chunk]"
    ),
    "                if ceil(c_id) == c_id:\n                    bwd_idx[m_chunk] += 1\n    else:\n": (
        "                if ceil(c_id) == c_id:\n"
        "                    bwd_idx[m_chunk] += 1\n"
        "                else:\n"
        "                    wgrad_idx[m_chunk] += 1\n"
        "    else:\n"
    ),
}


def mend() -> None:
    source = Path(te_graph.__file__).read_text(encoding="utf-8")
    for now, then in MENDED.items():
        assert source.count(now) == 1, now
        source = source.replace(now, then)
    exec(compile(source, te_graph.__file__, "exec"), vars(te_graph))


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
    splits = schedule.splits_backward
    depth = 1 if splits else 2  # Transformer Engine takes one layer per chunk if W is apart
    layer = partial(Linear, WIDTH, WIDTH, **DELAYED) if splits else Layer
    chunks, plain = ([[layer() for _ in range(depth)] for _ in stages] for _ in range(2))
    layers, others = ([layer for chunk in each for layer in chunk] for each in (chunks, plain))
    for one, other in zip(layers, others, strict=True):
        other.load_state_dict(one.state_dict())
        for parameter in (*one.parameters(), *other.parameters()):
            parameter.main_grad = torch.zeros_like(parameter)
    before = CUDAGraph.counts.copy()
    graphs = te_graph.make_graphed_callables(
        tuple(layers),
        tuple((torch.zeros(TOKENS, WIDTH, requires_grad=True),) for _ in range(len(layers) * m)),
        num_warmup_iters=1,
        allow_unused_input=True,
        _order=signed_chunks(schedule, device),
        _num_layers_per_chunk=[depth] * len(stages),
        _reuse_graph_input_output_buffers=True,
    )
    for layer in layers:  # as Megatron does after a capture
        layer.zero_grad()
        for parameter in layer.parameters():
            parameter.main_grad.zero_()
    given: list[torch.Tensor] = []  # gradients as a graph leaves them, and as we send them
    sent: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    at_once = 0
    for _ in range(2):
        inputs, outputs = {}, {}
        for action in order:
            chunk, microbatch = stages.index(action.stage), action.microbatch
            key = chunk, microbatch
            first = (chunk * m + microbatch) * depth
            if action.kind is Kind.F:
                x = torch.randn(TOKENS, WIDTH)
                inputs[key] = h, r = x.clone().requires_grad_(), x.clone().requires_grad_()
                for number in range(depth):
                    h = graphs[first + number](h)
                    r = plain[chunk][number](r)
                at_once += not torch.equal(h, r)
                outputs[key] = h, r
            elif action.kind is Kind.W:
                graphs[first].backward_dw()
                plain[chunk][0].backward_dw()
            else:
                (h, r), gradient = outputs.pop(key), torch.randn(TOKENS, WIDTH)
                h.backward(gradient.clone())
                r.backward(gradient)
                h, r = (each.grad for each in inputs.pop(key))
                at_once += not torch.equal(h, r)
                given.append(h)
                sent.append(h.clone())
                wanted.append(r)
    unlike = [
        not torch.equal(*(each.main_grad if splits else each.grad for each in (one, other)))
        for layer, other_layer in zip(layers, others, strict=True)
        for one, other in zip(layer.parameters(), other_layer.parameters(), strict=True)
    ]
    counts, each = CUDAGraph.counts - before, len(order) * depth
    return {
        "wrong": at_once + sum(unlike) + sum(not torch.equal(*pair) for pair in zip(sent, wanted, strict=True)),
        "overwritten": sum(not torch.equal(*pair) for pair in zip(given, wanted, strict=True)),
        "captures": counts["captures"] - each,
        "replays": counts["replays"] - 2 * each,
    }


def main(*cases: str) -> None:
    found = {}
    for case in cases:
        if case == "mended":
            mend()
            continue
        family, devices, microbatches = case.split(",")
        for device in range(int(devices)):
            found[f"{case},{device}"] = train(family, int(devices), int(microbatches), device)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
