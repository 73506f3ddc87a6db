"""Compute the LM head and its cross entropy for the rows of one rank, in phases.

Each phase of a microbatch returns the object that the next phase needs:

    scored = head.score(x, labels)                          # S: local logits and their statistics
    gathered = gather_statistics(scored.statistics).wait()
    done = combine(scored, gathered)                        # done.losses, then the gradients

This module does not communicate, and autograd does not record it. y are the scaled logits, M is their maximum over the
whole vocabulary, and Z = sum exp(y - M). Then:

    loss = log Z - (y_label - M)            dloss/dy = exp(y - M) / Z - onehot(label)

An input gradient computed here covers only the rows of this rank. The caller sums it over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.features.vocabulary.runtime import kernels
from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyEmbedding, WeightShard


@dataclass(frozen=True)
class HeadOptions:
    """Options of the head's computation, the same on every rank."""

    # How many passes of every device lie between forward and backward of the last stage. With 1 (S), the input gradient
    # is computed from statistics before the loss is known (the paper's Algorithm 2). With 2 (S and T), T computes it
    # after that (Algorithm 1).
    barriers: int = 1
    # How many tokens have logits in fp32 at a time; ``None`` for the whole microbatch. Pieces change results only if
    # matrix products of other sizes round differently.
    piece_tokens: int | None = None
    scale: float = 1.0  # factor of the logits
    compiled: bool = True  # compile the functions over logits on CUDA (see ``kernels.Compiler``)

    def __post_init__(self) -> None:
        if self.barriers not in (1, 2):
            raise VocabularyError("bad-number", f"barriers={self.barriers}: give 1 or 2")
        if self.piece_tokens is not None and self.piece_tokens < 1:
            raise VocabularyError("bad-number", f"piece_tokens={self.piece_tokens}: give at least 1, or None")

    def pieces(self, tokens: int) -> Iterator[slice]:
        """Split the tokens of a microbatch into pieces of ``piece_tokens``, and return the slice of each."""
        size = self.piece_tokens or max(tokens, 1)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


@dataclass(eq=False)
class HeadMicrobatch:
    """The head's data of one microbatch on this rank, from S until the gradients are computed.

    The rows of ``statistics`` are also available as ``own_maximum``, ``own_sum`` and ``target_logit``.
    """

    shard: WeightShard
    options: HeadOptions
    x: torch.Tensor  # the head's input, ``[tokens, h]``
    shape: torch.Size  # the shape of the labels before they are flattened to ``[tokens]``
    local: torch.Tensor  # the label's row within this shard, or 0 if another shard has it
    owned: torch.Tensor  # whether the label's row is in this shard
    valid: torch.Tensor  # whether the label is in the vocabulary
    # fp32, ``[3, tokens]``: the largest logit of this shard; the sum of the exponentials of its logits except the label's,
    # relative to that maximum and later to the maximum of all ranks; and the label's logit if ``owned``, else 0.
    statistics: torch.Tensor
    for_backward: bool
    # Logits from the matrix product, ``[tokens, rows]``, later overwritten by their gradient; ``None`` in evaluation.
    logits: torch.Tensor | None = None
    # The mean of this rank's weight rows, weighted by its softmax (times ``SOFTMAX_SUM``) without the label's row,
    # ``[tokens, h]``. With one barrier this is the input gradient, up to a factor per token and the label's part.
    average: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that this object keeps in memory, for the activation ledger."""
        kept = (self.x, self.local, self.owned, self.valid, self.statistics, self.logits, self.average)
        return tuple(tensor for tensor in kept if tensor is not None)

    def __post_init__(self) -> None:
        self.own_maximum, self.own_sum, self.target_logit = self.statistics

    @property
    def is_empty(self) -> bool:
        """Whether this rank's shard is empty, because there are more ranks than rows."""
        return not self.shard.rows

    def score(self, piece: slice, raw: torch.Tensor) -> None:
        """Compute and store the statistics of a piece of the tokens, and the average if there is one.

        ``raw`` has their logits from the matrix product, ``[tokens, rows]``.
        """
        if self.is_empty:
            self.own_maximum[piece] = torch.finfo(torch.float32).min
            self.own_sum[piece] = self.target_logit[piece] = 0
            if self.average is not None:
                self.average[piece] = 0
            return
        maximum, others, label, softmax = self.over_logits(
            kernels.statistics, piece, raw, softmax=self.average is not None
        )
        self.own_maximum[piece], self.own_sum[piece], self.target_logit[piece] = maximum, others, label
        if self.average is not None:
            torch.mm(softmax, self.shard.weight, out=self.average[piece])

    def over_logits(self, function: Callable, piece: slice, raw: torch.Tensor, *per_token: torch.Tensor, **constants):
        """Return the result of a function of ``kernels``, which may change ``raw``, on a piece; compiled if options say
        so.
        """
        options = self.options
        tensors = raw, self.local[piece], self.owned[piece], *per_token
        constants["scale"] = options.scale
        if options.compiled:
            return kernels.COMPILER.run(function, *tensors, **constants)
        return function(*tensors, **constants)


class VocabularyHead(torch.nn.Module):
    """One rank's rows of the LM head. Bias, label smoothing and fp8 are not supported.

    With ``is_tied``, ``shard`` is the embedding's, which alone has the parameter.
    """

    def __init__(self, shard: WeightShard, options: HeadOptions | None = None, is_tied: bool = False):
        super().__init__()
        self.shard, self.options = shard, options or HeadOptions()
        self.weight: torch.nn.Parameter | None
        self.register_parameter("weight", None if is_tied else shard.parameter)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None, for_backward: bool = True
    ) -> HeadMicrobatch | torch.Tensor:
        """Return the logits' statistics for the losses (``score``), or ``logits`` if there are no labels."""
        return self.logits(x) if labels is None else self.score(x, labels, for_backward=for_backward)

    @torch.no_grad()
    def score(self, x: torch.Tensor, labels: torch.Tensor, *, for_backward: bool = True) -> HeadMicrobatch:
        """Run S: compute the logits of this rank's rows and the statistics that the loss needs.

        ``x`` is the head's input, ``[..., h]`` in the parameter's dtype, the same on every rank. Do not modify it until
        the weight gradient has been computed. A label outside the vocabulary, for example -100, is ignored: its loss is
        0 and it has no gradient. With ``for_backward=False``, as for evaluation, no data are kept for gradients.
        """
        if labels.shape != x.shape[:-1]:
            raise VocabularyError(
                "wrong-shape",
                f"labels of shape {tuple(labels.shape)} for an input of shape {tuple(x.shape)}: labels need all of its "
                "dimensions but the last, in its order",
            )
        options, weight = self.options, self.shard.weight
        x = self._rows_of(x)
        local, owned = self.shard.locate(labels.reshape(-1))
        valid = ((labels >= 0) & (labels < self.shard.partition.vocab_size)).reshape(-1)
        tokens = x.size(0)
        statistics = torch.empty(3, tokens, dtype=torch.float32, device=x.device)
        batch = HeadMicrobatch(self.shard, options, x, labels.shape, local, owned, valid, statistics, for_backward)
        if for_backward:
            batch.logits = x.new_empty(tokens, weight.size(0))
            batch.average = torch.empty_like(x) if options.barriers == 1 else None
        for piece in options.pieces(tokens):
            raw = torch.mm(x[piece], weight.t(), out=None if batch.logits is None else batch.logits[piece])
            batch.score(piece, raw)
        return batch

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled logits of this rank's rows, ``[..., rows]`` in the parameter's dtype.

        They are for inference. ``collectives.gather_logits`` combines those of all ranks.
        """
        rows = self._rows_of(x)
        logits = rows.new_empty(rows.size(0), len(self.shard.rows))
        for piece in self.options.pieces(rows.size(0)):
            raw = rows[piece] @ self.shard.weight.t()
            logits[piece] = kernels.transform(raw, self.options.scale)
        return logits.view(*x.shape[:-1], logits.size(1))

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as ``[tokens, h]``, detached from autograd's graph. Raise a VocabularyError for a wrong size or
        dtype.
        """
        parameter = self.shard.parameter
        if x.size(-1) != parameter.size(1) or x.dtype != parameter.dtype:
            raise VocabularyError(
                "wrong-shape",
                f"input of shape {tuple(x.shape)} in {x.dtype} for a head of hidden size {parameter.size(1)} in "
                f"{parameter.dtype}: both must agree",
            )
        return x.detach().reshape(-1, x.size(-1))


_TIE = 1e-5
"""Two logits with a smaller difference count as equal."""


@torch.no_grad()
def finish_input_gradient(
    total: torch.Tensor, dtype: torch.dtype, loss_gradient: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient with respect to the head's input, ``[..., h]``, from the sum ``total`` over all ranks.

    With one barrier, ``total`` lacks the factor ``loss_gradient``, that of the token losses (``without_ignored``).
    """
    return (total if loss_gradient is None else total * loss_gradient.unsqueeze(-1)).to(dtype)


class Normalised:
    """The token losses of one microbatch, the same on every rank, and the numbers from which gradients are computed.

    The arguments have one number for each token. ``maximum`` is the largest logit of the whole vocabulary. ``others``
    is the sum of exp(logit - maximum) over all rows except the label's. ``label`` is the label's logit minus
    ``maximum``. From them follow the ``NUMBERS`` that are kept for each token: the maximum, the sum of exp(logit -
    maximum) over all rows, the gradient of the label's logit, and the loss. They are written to ``into``, fp32
    ``[NUMBERS, tokens]``, or to new memory if it is ``None``.
    """

    NUMBERS = 4
    """How many numbers are kept for each token."""

    def __init__(
        self,
        batch: HeadMicrobatch,
        maximum: torch.Tensor,
        others: torch.Tensor,
        label: torch.Tensor,
        into: torch.Tensor | None,
    ):
        self._batch = batch
        self._gradients_left = batch.for_backward
        total = others + torch.exp(label)
        # log(1 + others / exp(label)): precise even if the label is almost certain.
        nll = torch.nn.functional.softplus(torch.log(others) - label)
        label_gradient = torch.expm1(-nll)  # without the cancellation near probability 1
        nll.masked_fill_(~batch.valid, 0)
        self._kept = torch.stack((maximum, total, label_gradient, nll), out=into)
        self._maximum, self._total, self._label, self._losses = self._kept

    @property
    def losses(self) -> torch.Tensor:
        """The loss of each token, fp32, in the labels' shape."""
        return self._losses.view(self._batch.shape)

    @property
    def hits(self) -> torch.Tensor:
        """Whether each label is the token with the highest logit, in the labels' shape.

        Logits within 1e-5 count as equal, and ignored labels as hits.
        """
        # exp(label - maximum), from the kept numbers.
        return (self._total * torch.exp(-self._losses) >= 1 - _TIE).view(self._batch.shape)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are kept until the gradients are computed, for the activation ledger."""
        return (*self._batch.tensors, self._kept)

    @property
    def options(self) -> HeadOptions:
        return self._batch.options

    @property
    def pieces(self) -> Iterator[slice]:
        return self.options.pieces(self._batch.x.size(0))

    def without_ignored(self, loss_gradient: torch.Tensor) -> torch.Tensor:
        """Return ``loss_gradient`` with zeros for ignored labels, fp32, in the labels' shape."""
        return self._flat(loss_gradient).view(self._batch.shape)

    def _message(self) -> torch.Tensor:
        return torch.empty(self._batch.x.shape, dtype=torch.float32, device=self._batch.x.device)

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*self._batch.shape, rows.size(-1))

    def _flat(self, loss_gradient: torch.Tensor) -> torch.Tensor:
        """Return ``loss_gradient`` with zeros for ignored labels, fp32, ``[tokens]``."""
        batch = self._batch
        if loss_gradient.numel() != batch.valid.numel():
            raise VocabularyError(
                "wrong-shape",
                f"loss gradient of shape {tuple(loss_gradient.shape)} for losses of shape {tuple(batch.shape)}: give one "
                "number per token",
            )
        return loss_gradient.detach().reshape(-1).to(torch.float32).masked_fill(~batch.valid, 0)

    def _spend_logits(self) -> None:
        """Note that the gradient of the logits overwrites them. A second call raises a VocabularyError."""
        if not self._gradients_left:
            raise _taken_already()
        self._gradients_left = False

    @property
    def _logits(self) -> torch.Tensor:
        assert self._batch.logits is not None, "score() was called for_backward"
        return self._batch.logits

    def _logit_gradient(self, piece: slice, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits of one piece, ``[tokens, rows]``, which overwrites them. ``g`` is
        ``_flat``.
        """
        batch, raw = self._batch, self._logits[piece]
        if batch.is_empty:
            return raw
        scaled = g[piece] * self.options.scale
        factor = scaled / self._total[piece]
        batch.over_logits(kernels.logit_gradient, piece, raw, self._maximum[piece], factor, scaled * self._label[piece])
        return raw

    def _add_weight_gradient(self) -> None:
        """Add ``logit gradient^T @ x`` to the gradient of the parameter, unless it is frozen."""
        x = self._batch.x
        if not self._trains:
            return
        with self._batch.shard.adding_gradient() as gradient:
            if gradient.dtype == x.dtype or gradient.device.type == "cuda":
                add_product(gradient, self._logits, x)
                return
            # fp32 copies hold one piece at a time, like all fp32 tensors of that size.
            for piece in self.pieces:
                add_product(gradient, self._logits[piece], x[piece])

    @property
    def _trains(self) -> bool:
        return self._batch.shard.parameter.requires_grad


def _taken_already() -> VocabularyError:
    return VocabularyError(
        "taken-twice",
        "this gradient of the microbatch was computed already, or score() had for_backward=False; take each gradient once",
    )


class OneBarrier(Normalised):
    """The algorithm with one barrier: the input gradient needs only the statistics of all ranks, and not the loss."""

    @property
    def owes_input_gradient(self) -> bool:
        """Whether ``input_gradient`` has not been called yet."""
        return self._batch.average is not None

    @torch.no_grad()
    def input_gradient(self) -> torch.Tensor:
        """Return the input gradient from this rank's rows, ``[..., h]``, to sum over ranks, up to a factor per token.

        ``finish_input_gradient`` multiplies by it. A second call raises a VocabularyError.
        """
        batch, options = self._batch, self.options
        average, batch.average = batch.average, None
        if average is None:
            raise _taken_already()
        share = batch.own_sum / self._total * (options.scale / kernels.SOFTMAX_SUM)
        label = torch.where(batch.owned, self._label * options.scale, 0.0)
        message = self._message()
        for piece in self.pieces:
            part = average[piece].to(torch.float32).mul_(share[piece, None])
            if not batch.is_empty:
                rows = batch.shard.weight[batch.local[piece]]
                part.addcmul_(rows.to(torch.float32), label[piece, None])
            message[piece] = part
        return self._shaped(message)

    @torch.no_grad()
    def add_weight_gradient(self, loss_gradient: torch.Tensor) -> None:
        """Run T: add the weight gradient to that of the parameter. A second call raises a VocabularyError.

        ``loss_gradient`` is the gradient of the training loss with respect to ``losses``, loss scale included.
        """
        g = self._flat(loss_gradient)
        self._spend_logits()
        if self._trains:
            for piece in self.pieces:
                self._logit_gradient(piece, g)
        self._add_weight_gradient()


class TwoBarriers(Normalised):
    """The algorithm with two barriers: both gradients are computed from the gradient of the token losses.

    The first barrier exchanges statistics, the second sums the input gradient.
    """

    @torch.no_grad()
    def gradients(self, loss_gradient: torch.Tensor) -> torch.Tensor:
        """Run T: return the input gradient from this rank's rows, ``[..., h]``, to sum over ranks; add the weight
        gradient.

        ``loss_gradient`` is as in ``OneBarrier.add_weight_gradient``. A second call raises a VocabularyError.
        """
        g = self._flat(loss_gradient)
        self._spend_logits()
        message = self._message()
        for piece in self.pieces:
            message[piece] = self._logit_gradient(piece, g) @ self._batch.shard.weight
        self._add_weight_gradient()
        return self._shaped(message)


def add_product(gradient: torch.Tensor, output_gradient: torch.Tensor, input: torch.Tensor) -> None:
    """Add ``output_gradient^T @ input`` to ``gradient`` in place.

    If the factors have 16 bits and ``gradient`` is fp32, the product is not rounded to 16 bits. On CUDA this needs
    torch 2.8. With an older torch the product is rounded there, because a product of fp32 copies would be many times
    slower. Other devices do multiply fp32 copies.
    """
    transposed = output_gradient.t()
    if gradient.dtype == input.dtype:
        gradient.addmm_(transposed, input)
    elif gradient.dtype == torch.float32 and gradient.device.type != "cuda":
        gradient.addmm_(transposed.float(), input.float())
    elif gradient.dtype == torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(gradient, transposed, input, out_dtype=gradient.dtype, out=gradient)
    else:
        gradient.add_(transposed @ input)


@torch.no_grad()
def combine(
    batch: HeadMicrobatch, gathered: torch.Tensor, into: torch.Tensor | None = None
) -> OneBarrier | TwoBarriers:
    """Compute the losses of a microbatch from the statistics of all ranks. The result computes the gradients.

    ``gathered`` has the ``statistics`` of all ranks, ``[ranks, 3, tokens]``, in the same order on every rank. ``into``
    is memory for the result (see ``Normalised``). Call this once for each ``batch``, because it changes
    ``batch.own_sum``: the sum is then relative to the maximum of all ranks.
    """
    maxima, sums, labels = gathered.unbind(1)
    maximum = maxima.amax(0)
    others = (sums * torch.exp(maxima - maximum)).sum(0)
    # One rank owns a token's label and the others have 0. No rank owns a label outside the vocabulary.
    label = torch.where(batch.valid, labels.sum(0) - maximum, 0.0)
    batch.own_sum.mul_(torch.exp(batch.own_maximum - maximum))
    kind = OneBarrier if batch.options.barriers == 1 else TwoBarriers
    return kind(batch, maximum, others, label, into)


class VocabularyShards(torch.nn.Module):
    """This rank's shards of the embedding and the LM head. ``head`` is ``None`` if both share one matrix."""

    def __init__(self, embedding: WeightShard, head: WeightShard | None, options: HeadOptions):
        super().__init__()
        self.partition = embedding.partition
        self.embedding = VocabularyEmbedding(embedding)
        self.head = VocabularyHead(head or embedding, options, is_tied=head is None)
