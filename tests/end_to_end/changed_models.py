"""Changes that users make to a model of Megatron, when it is made or after it is built and wrapped by DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.utils import parametrize, prune

Model = torch.nn.Module


class Change(NamedTuple):
    made: Callable[[Model], None] | None = None  # in the user's model provider
    built: Callable[[Model], None] | None = None  # on the model that Megatron has wrapped


def _parts(model: Model, name: str) -> Iterator[torch.nn.Module]:
    return (part for key, part in model.named_modules() if key.rpartition(".")[2] == name)


class _Times(torch.nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


class _Merged(torch.nn.Module):
    """A low-rank adapter that is merged into the weight in every forward: ``W + B A``."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        rows, columns = weight.shape
        self.A = torch.nn.Parameter(torch.linspace(-0.1, 0.1, 2 * columns, dtype=weight.dtype).view(2, columns))
        self.B = torch.nn.Parameter(torch.linspace(0.1, -0.2, 2 * rows, dtype=weight.dtype).view(rows, 2))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.B @ self.A


def _parametrized(name: str, make: Callable[[torch.Tensor], torch.nn.Module]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for part in _parts(model, name):
            if getattr(part, "weight", None) is not None:
                parametrize.register_parametrization(part, "weight", make(part.weight), unsafe=True)

    return change


def _computed(name: str) -> Callable[[Model], None]:
    """Scale the weight of a module whose checkpoint needs a parameter of this name."""

    def change(model: Model) -> None:
        for part in _parts(model, name):
            original = part.weight
            parametrize.register_parametrization(part, "weight", _Times(1.5))

            def state(prefix="", sharded_offsets=(), metadata=None, original=original):
                return make_sharded_tensors_for_checkpoint({"weight": original}, prefix, {"weight": 0}, sharded_offsets)

            part.sharded_state_dict = state

    return change


def _weight_norm(model: Model) -> None:
    for part in _parts(model, "linear_proj"):
        torch.nn.utils.parametrizations.weight_norm(part)


def _pruned(model: Model) -> None:
    for part in _parts(model, "linear_fc2"):
        mask = torch.arange(part.weight.numel()).view_as(part.weight) % 3 > 0
        prune.custom_from_mask(part, "weight", mask.to(part.weight))


def _weights(model: Model, *names: str) -> Iterator[torch.nn.Parameter]:
    for name, parameter in model.named_parameters():
        if any(part in name for part in names) and parameter.requires_grad:
            yield parameter


def _hooked(*names: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for parameter in _weights(model, *names):
            parameter.register_hook(lambda gradient: gradient * 0.5)

    return change


def _hooked_twice(model: Model) -> None:
    for parameter in _weights(model, "linear_qkv.weight"):
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        parameter.register_hook(lambda gradient: gradient + 1e-4)


def _counting_hook(model: Model) -> None:
    """A hook whose factor depends on how often it was called: it sees every microbatch once."""
    for parameter in _weights(model, "linear_fc1.weight"):
        calls: list[int] = []

        def hook(gradient: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            return gradient * len(calls)

        parameter.register_hook(hook)


def _halve_sum(parameter: torch.Tensor, *_: object) -> None:
    parameter.main_grad.mul_(0.5)


def _on_nodes(when: str) -> Callable[[Model], None]:
    """Hooks on the autograd nodes that add gradients, before or after they do."""

    def change(model: Model) -> None:
        model.kept = []
        for parameter in _weights(model, "linear_fc2.weight"):
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            model.kept.append(node)
            if when == "before":
                node.register_prehook(lambda gradients: (gradients[0] * 0.25,))
            else:
                node.register_hook(partial(_halve_sum, parameter))

    return change


def _halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def _after_accumulation(model: Model) -> None:
    for parameter in _weights(model, "linear_proj.weight"):
        parameter.register_post_accumulate_grad_hook(_halve)


def _several_at_once(model: Model) -> None:
    for part in _parts(model, "mlp"):
        weights = part.linear_fc1.weight, part.linear_fc2.weight
        torch.autograd.graph.register_multi_grad_hook(weights, partial(_halve_sum, part.linear_fc2.bias))


def _frozen(*names: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for parameter in _weights(model, *names):
            parameter.requires_grad_(False)

    return change


class _Adapter(torch.nn.Module):
    """A low-rank adapter beside a linear layer of Megatron, as LoRA has it."""

    def __init__(self, base: torch.nn.Module):
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape
        self.A = torch.nn.Parameter(torch.linspace(-0.1, 0.1, 2 * columns, dtype=base.weight.dtype).view(2, columns))
        self.B = torch.nn.Parameter(torch.linspace(0.1, -0.2, 2 * rows, dtype=base.weight.dtype).view(rows, 2))

    def forward(self, x: torch.Tensor, *arguments, **named):
        output, bias = self.base(x, *arguments, **named)
        return output + x @ self.A.t() @ self.B.t(), bias

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        own = {"A": self.A, "B": self.B}
        state = make_sharded_tensors_for_checkpoint(own, f"{prefix}adapter.", {}, sharded_offsets)
        return self.base.sharded_state_dict(prefix, sharded_offsets, metadata) | state


def _adapters(freeze: bool) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        if freeze:
            model.requires_grad_(False)
        for part in [*model.modules()]:
            for name in ("linear_qkv", "linear_fc1"):
                if hasattr(part, name):
                    setattr(part, name, _Adapter(getattr(part, name)))

    return change


def _shared_layers(model: Model) -> None:
    """A second layer beside the projection has the same parameters."""
    for part in [*_parts(model, "linear_proj")]:
        twin = copy.copy(part)
        vars(twin).update({name: copy.copy(value) for name, value in vars(part).items() if isinstance(value, dict)})
        part.twin = twin
        part.register_forward_hook(
            lambda of, arguments, output: (output[0] + of.twin(arguments[0] * 0.5)[0], output[1])
        )


def _view_of_a_larger_one(model: Model) -> None:
    """The layer's weight is a view of a larger parameter, in every forward anew."""
    for part in _parts(model, "linear_fc1"):
        weight = part.weight
        part.larger = torch.nn.Parameter(torch.cat((weight.detach(), weight.detach())))
        del part.weight
        part.register_forward_pre_hook(lambda of, _: setattr(of, "weight", of.larger[: of.larger.size(0) // 2]))


def _leaf_views(model: Model) -> None:
    """Parameters whose memory is a part of one larger tensor."""
    for part in _parts(model, "linear_fc1"):
        memory = torch.cat((part.weight.detach(), part.weight.detach()))
        part.weight.data = memory[: memory.size(0) // 2]


class _Labelled(torch.nn.Parameter):
    """A subclass of parameters, as quantisation libraries have them."""


def _subclass(model: Model) -> None:
    for part in _parts(model, "linear_proj"):
        kept = vars(part.weight)
        part.weight = _Labelled(part.weight.detach().clone())
        vars(part.weight).update(kept)


class _OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        x, scale = ctx.saved_tensors
        return gradient * scale * 0.9, (gradient * x).sum((0, 1))


class _OwnLayer(torch.nn.Module):
    """A user's layer, with a parameter and an autograd function of their own."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.unused = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _OwnFunction.apply(x, self.scale)


def _own_layers(model: Model) -> None:
    for part in model.modules():
        if hasattr(part, "linear_fc2") and hasattr(part, "config"):
            part.own = _OwnLayer(part.config.hidden_size)
            part.register_forward_pre_hook(lambda of, arguments: (of.own(arguments[0]), *arguments[1:]))


def _plain_linear(model: Model) -> None:
    """A layer of torch.nn beside the attention."""
    for part in model.modules():
        if hasattr(part, "linear_qkv") and hasattr(part, "config"):
            width = part.config.hidden_size
            part.beside = torch.nn.Linear(width, width, bias=False)
            with torch.no_grad():
                part.beside.weight.copy_(torch.linspace(-0.1, 0.1, width * width).view(width, width))
            part.linear_qkv.register_forward_pre_hook(
                lambda _, arguments, of=part: (arguments[0] + of.beside(arguments[0]), *arguments[1:])
            )


def _stopped(model: Model) -> None:
    """The gradient does not pass the attention of every layer, so its weights get none."""
    for part in _parts(model, "self_attention"):
        part.register_forward_hook(lambda _, __, output: (output[0].detach(), output[1]))


def _penalty(model: Model) -> None:
    """A weight that is used by its layer and by a term beside it."""
    for part in _parts(model, "linear_fc2"):
        part.register_forward_hook(lambda of, _, output: (output[0] + of.weight.square().mean(), output[1]))


def _module_hooks(model: Model) -> None:
    for part in _parts(model, "mlp"):
        part.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 0.5, *gradients[1:]))


def _used_twice(model: Model) -> None:
    """The projection runs twice, with one hook on its weight that is not linear."""
    for part in _parts(model, "linear_proj"):
        forward = part.forward
        part.forward = lambda x, forward=forward: (forward(x)[0] + forward(x * 0.5)[0], forward(x)[1])


def _used_twice_and_hooked(model: Model) -> None:
    _used_twice(model)
    for parameter in _weights(model, "linear_proj.weight"):
        parameter.register_hook(lambda gradient: gradient.square().sign() * gradient.abs().sqrt())


def _scaled_embeddings(model: Model) -> None:
    """As of Gemma: the embedding's output is scaled by a forward hook."""
    for part in model.modules():
        if isinstance(part, VocabParallelEmbedding):
            part.register_forward_hook(lambda _, __, output: output * 8.0)


def _own_loss(model: Model) -> None:
    if isinstance(model, LanguageModule):
        compute = model.compute_language_model_loss
        model.compute_language_model_loss = lambda *arguments: compute(*arguments) * 0.5


def _marked(model: Model) -> None:
    """A mark by which an optimizer tells weights apart."""
    for parameter in _weights(model, "word_embeddings.weight", "output_layer.weight"):
        parameter.of_the_vocabulary = True


def _replaced_head(model: Model) -> None:
    head = getattr(model, "output_layer", None)
    if isinstance(head, ColumnParallelLinear):
        for parameter in head.parameters():
            parameter.requires_grad_(False)
        model.output_layer = _Adapter(head)


VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "vocabulary.")
CHANGES: dict[str | None, Change] = {
    None: Change(),
    "scaled weights": Change(_parametrized("linear_fc1", lambda _: _Times(1.5))),
    "scaled projections": Change(_parametrized("linear_proj", lambda _: _Times(0.5))),
    "merged adapters": Change(_parametrized("linear_qkv", _Merged)),
    "weight norm": Change(_weight_norm),
    "pruned": Change(_pruned),
    "computed embedding": Change(_computed("word_embeddings")),
    "computed head": Change(_computed("output_layer")),
    "view of a larger weight": Change(_view_of_a_larger_one),
    "hooked": Change(_hooked("linear_fc1.weight", "linear_fc2.bias")),
    "hooked later": Change(None, _hooked("linear_fc1.weight", "linear_qkv.bias")),
    "hooked twice": Change(_hooked_twice),
    "hook that counts": Change(_counting_hook),
    "hooked vocabulary": Change(_hooked(*VOCABULARY)),
    "hooked vocabulary later": Change(None, _hooked(*VOCABULARY)),
    "hooks before nodes": Change(None, _on_nodes("before")),
    "hooks after nodes": Change(None, _on_nodes("after")),
    "hooks after accumulation": Change(None, _after_accumulation),
    "hook of several": Change(None, _several_at_once),
    "frozen head": Change(_frozen("output_layer.weight")),
    "frozen embedding": Change(_frozen("word_embeddings.weight")),
    "frozen attention": Change(_frozen("self_attention")),
    "adapters": Change(_adapters(freeze=False)),
    "adapters alone": Change(_adapters(freeze=True)),
    "shared layers": Change(_shared_layers),
    "leaf views": Change(_leaf_views),
    "subclass": Change(_subclass),
    "own layers": Change(_own_layers),
    "plain linear": Change(_plain_linear),
    "stopped gradient": Change(_stopped),
    "penalty": Change(_penalty),
    "module hooks": Change(_module_hooks),
    "used twice": Change(_used_twice),
    "used twice and hooked": Change(_used_twice_and_hooked),
    "scaled embeddings": Change(_scaled_embeddings),
    "own loss": Change(_own_loss),
    "marked": Change(_marked),
    "replaced head": Change(_replaced_head),
}
