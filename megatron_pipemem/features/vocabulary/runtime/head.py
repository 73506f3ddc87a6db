"""Compute the LM head with its cross entropy, for one rank's rows and phase by phase.

One microbatch goes through a chain of objects, one per phase:

    scored = head.score(x, labels)                          # S: local logits and their statistics
    gathered = gather_statistics(scored.statistics).wait()
    done = combine(scored, gathered)                        # done.losses, then the gradients

This module does not communicate, and autograd does not record it. y are the logits (scaled and capped), M is their maximum
over the whole vocabulary, S = sum exp(y - M), and Z = log S + M:

    loss = log S - (y_label - M) + z Z^2            dloss/dy = (1 + 2zZ) exp(y - M) / S - onehot(label)

Input gradients are first partial: sums over this rank's rows, to be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.features.vocabulary.runtime import kernels
from megatron_pipemem.features.vocabulary.runtime.shards import WeightShard
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient


@dataclass(frozen=True)
class HeadOptions:
    """Options of the head's computation, the same on every rank."""

    # Number of collectives in sequence that the last stage's backward waits for. 1 computes the input gradient from statistics
    # before the loss is known (the paper's Algorithm 2), and 2 after it (its Algorithm 1).
    barriers: int = 1
    # Number of tokens whose logits are in fp32 at a time; ``None`` for the whole microbatch. Pieces change results only if
    # matrix products of other sizes round differently.
    piece_tokens: int | None = None
    # Keep the logits, ``[tokens, rows]`` in the parameter's dtype, until their gradient is taken. ``False`` computes
    # them again, piece by piece, with one more matrix product per use but no memory of that size.
    keep_logits: bool = True
    scale: float = 1.0  # factor of the logits
    softcap: float | None = None  # ``c`` of ``c * tanh(logits / c)``, applied after ``scale``
    z_loss: float = 0.0  # factor of the squared log-partition function, which is added to every token's loss
    # Type of the partial input gradients that are summed over the ranks. 16 bit halves the message and rounds once per rank.
    message_dtype: torch.dtype = torch.float32
    compiled: bool = True  # compile the passes over logits on CUDA, see ``kernels.Compiler``

    def __post_init__(self) -> None:
        for holds, problem in (
            (self.barriers in (1, 2), f"barriers={self.barriers}: give 1 or 2"),
            (
                self.piece_tokens is None or self.piece_tokens >= 1,
                f"piece_tokens={self.piece_tokens}: give at least 1, or None",
            ),
            (
                self.softcap is None or self.softcap > 0,
                f"softcap={self.softcap}: give a positive number, or None for no cap",
            ),
            (self.z_loss >= 0, f"z_loss={self.z_loss}: give at least 0"),
        ):
            if not holds:
                raise VocabularyError("bad-number", problem)

    def pieces(self, tokens: int) -> Iterator[slice]:
        """Return the slices of a microbatch's tokens, piece by piece."""
        size = self.piece_tokens or max(tokens, 1)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


@dataclass(eq=False)
class HeadMicrobatch:
    """State of the head for one microbatch. Its rows of ``statistics`` are ``own_maximum``, ``own_sum`` and
    ``target_logit``."""

    shard: WeightShard
    options: HeadOptions
    x: torch.Tensor  # input, ``[tokens, h]``
    shape: torch.Size  # original shape of the labels
    local: torch.Tensor  # the label's row within this shard, or 0 if another shard has it
    owned: torch.Tensor  # whether the label's row is in this shard
    valid: torch.Tensor  # whether the label is in the vocabulary
    # fp32, ``[3, tokens]``: the largest logit of this shard; the sum of the exponentials of its logits except the label's,
    # relative to that maximum and later to the maximum of all ranks; and the label's logit if ``owned``, else 0.
    statistics: torch.Tensor
    for_backward: bool
    # Result of the matrix product, ``[tokens, rows]``, replaced later by its gradient; ``None`` if not kept.
    logits: torch.Tensor | None = None
    # Rows of the weights averaged by the local softmax (times ``SOFTMAX_SUM``) without the label's row, ``[tokens, h]``. Up to
    # factors per token, this is the input gradient of the one-barrier algorithm.
    average: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that it holds, for the activation ledger."""
        kept = (self.x, self.local, self.owned, self.valid, self.statistics, self.logits, self.average)
        return tuple(tensor for tensor in kept if tensor is not None)

    def __post_init__(self) -> None:
        self.own_maximum, self.own_sum, self.target_logit = self.statistics

    @property
    def no_rows(self) -> bool:
        """Return whether this shard is empty, because there are more ranks than rows."""
        return not self.shard.rows

    def score(self, piece: slice, raw: torch.Tensor) -> None:
        """Compute the statistics of a piece of the tokens from its logits."""
        if self.no_rows:
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
        """Run a pass of ``kernels`` over the logits of a piece of the tokens, compiled if the options say so."""
        options = self.options
        tensors = raw, self.local[piece], self.owned[piece], *per_token
        constants |= {"scale": options.scale, "softcap": options.softcap}
        if options.compiled:
            return kernels.COMPILER.run(function, *tensors, **constants)
        return function(*tensors, **constants)


@dataclass(frozen=True)
class VocabularyHead:
    """One rank's share of the LM head. Bias, label smoothing and fp8 are not supported. A tied head shares the embedding's."""

    shard: WeightShard
    options: HeadOptions = field(default_factory=HeadOptions)

    @torch.no_grad()
    def score(self, x: torch.Tensor, labels: torch.Tensor, *, for_backward: bool = True) -> HeadMicrobatch:
        """Run S: compute the logits of this rank's rows and their statistics for the loss.

        ``x`` is the head's input, ``[..., h]`` in the parameter's dtype, the same on every rank. It must not be modified until
        the weight gradient has run. A label outside the vocabulary, for example -100, is ignored: loss 0, no gradient.
        ``for_backward=False``, for evaluation, keeps nothing for gradients.
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
        if for_backward and options.keep_logits:
            batch.logits = x.new_empty(tokens, weight.size(0))
        if for_backward and options.barriers == 1:
            batch.average = torch.empty_like(x)
        for piece in options.pieces(tokens):
            raw = torch.mm(x[piece], weight.t(), out=None if batch.logits is None else batch.logits[piece])
            batch.score(piece, raw)
        return batch

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return scaled and capped logits of this rank's rows, ``[..., rows]`` in the parameter's dtype, for inference.

        ``collectives.gather_logits`` turns them into those of the whole vocabulary.
        """
        rows = self._rows_of(x)
        logits = rows.new_empty(rows.size(0), len(self.shard.rows))
        for piece in self.options.pieces(rows.size(0)):
            raw = rows[piece] @ self.shard.weight.t()
            logits[piece] = kernels.transform(raw, self.options.scale, self.options.softcap)
        return logits.view(*x.shape[:-1], logits.size(1))

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as ``[tokens, h]`` without a graph."""
        parameter = self.shard.parameter
        if x.size(-1) != parameter.size(1) or x.dtype != parameter.dtype:
            raise VocabularyError(
                "wrong-shape",
                f"input of shape {tuple(x.shape)} in {x.dtype} for a head of hidden size {parameter.size(1)} in "
                f"{parameter.dtype}: both must agree",
            )
        return x.detach().reshape(-1, x.size(-1))


_TIE = 1e-5
"""Logits this close count as equal."""


@torch.no_grad()
def finish_input_gradient(
    total: torch.Tensor, dtype: torch.dtype, loss_gradient: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of the training loss with respect to the head's input, ``[..., h]``, on the rank with the sum.

    ``total`` is the sum of all ranks' parts. With one barrier the parts lack the gradient of the loss, which is then
    ``loss_gradient``, made by ``Normalised.without_ignored``.
    """
    return (total if loss_gradient is None else total * loss_gradient.unsqueeze(-1)).to(dtype)


class Normalised:
    """The losses of one microbatch, which are the same on every rank.

    Per token, ``maximum`` is that of the logits over the whole vocabulary, ``others`` is the sum of exp(logit - maximum) over
    all rows except the label's, and ``label`` is the label's logit minus the maximum. ``into`` is memory for the numbers kept
    per token, fp32 ``[NUMBERS, tokens]``; ``None`` takes new memory.
    """

    NUMBERS = 5
    """Numbers kept per token."""

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
        z = self.options.z_loss
        # The label's entry, without the cancellation near probability 1, and the factor of all others.
        label_factor = torch.expm1(-nll)
        factor = torch.ones_like(nll)
        if z:
            log_partition = maximum + torch.log(total)
            excess = 2 * z * log_partition
            label_factor += torch.exp(-nll) * excess
            factor += excess
            nll = nll + z * log_partition.square()
        nll.masked_fill_(~batch.valid, 0)
        self._kept = torch.stack((maximum, total, label_factor, factor, nll), out=into)
        self._maximum, self._total, self._label, self._factor, self._losses = self._kept

    @property
    def losses(self) -> torch.Tensor:
        """The losses in fp32, in the labels' shape."""
        return self._losses.view(self._batch.shape)

    @property
    def hits(self) -> torch.Tensor:
        """Whether each label is the likeliest token, in the labels' shape. A tie within rounding counts."""
        # exp(label - maximum), from the kept numbers.
        return (self._total * torch.exp(-self._losses) >= 1 - _TIE).view(self._batch.shape)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors held until the gradients are computed, for the activation ledger."""
        return (*self._batch.tensors, self._kept)

    @property
    def options(self) -> HeadOptions:
        return self._batch.options

    @property
    def pieces(self) -> Iterator[slice]:
        return self.options.pieces(self._batch.x.size(0))

    def without_ignored(self, loss_gradient: torch.Tensor) -> torch.Tensor:
        """Return the loss gradient with zeros for ignored tokens, fp32, in the labels' shape."""
        return self._flat(loss_gradient).view(self._batch.shape)

    def _message(self) -> torch.Tensor:
        x = self._batch.x
        return torch.empty(x.shape, dtype=self.options.message_dtype, device=x.device)

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*self._batch.shape, rows.size(-1))

    def _flat(self, loss_gradient: torch.Tensor) -> torch.Tensor:
        """Return the loss gradient, one number per token in fp32, with zeros for ignored tokens."""
        batch = self._batch
        if loss_gradient.numel() != batch.valid.numel():
            raise VocabularyError(
                "wrong-shape",
                f"loss gradient of shape {tuple(loss_gradient.shape)} for losses of shape {tuple(batch.shape)}: give one "
                "number per token",
            )
        return loss_gradient.detach().reshape(-1).to(torch.float32).masked_fill(~batch.valid, 0)

    def _spend_logits(self) -> None:
        """Mark the logits as used. Their gradient replaces them, so it can be computed only once."""
        if not self._gradients_left:
            raise _taken_already()
        self._gradients_left = False

    def _logit_gradient(self, piece: slice, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits of one piece, in the parameter's dtype. It replaces kept logits."""
        batch, options = self._batch, self.options
        raw = batch.x[piece] @ batch.shard.weight.t() if batch.logits is None else batch.logits[piece]
        if batch.no_rows:
            return raw
        scaled = g[piece] * options.scale
        factor = scaled * self._factor[piece] / self._total[piece]
        batch.over_logits(kernels.logit_gradient, piece, raw, self._maximum[piece], factor, scaled * self._label[piece])
        return raw


def _taken_already() -> VocabularyError:
    return VocabularyError(
        "taken-twice",
        "this gradient of the microbatch was computed already, or score() had for_backward=False; take each gradient once",
    )


class OneBarrier(Normalised):
    """Compute the input gradient from statistics alone, before ``g`` is known, and the weight gradient at any later time."""

    @property
    def owes_input_gradient(self) -> bool:
        """Return whether the input gradient has not been computed yet."""
        return self._batch.average is not None

    @torch.no_grad()
    def input_gradient(self) -> torch.Tensor:
        """Return this rank's part of the gradient with respect to the head's input, ``[..., h]``, to be summed over the ranks.

        It lacks ``g``. ``finish_input_gradient`` turns the sum into the gradient of the training loss.
        """
        batch, options = self._batch, self.options
        average, batch.average = batch.average, None
        if average is None:
            raise _taken_already()
        share = batch.own_sum / self._total * self._factor * (options.scale / kernels.SOFTMAX_SUM)
        slope = kernels.slope(batch.target_logit, options.softcap)
        label = torch.where(batch.owned, self._label * slope * options.scale, 0.0)
        message = self._message()
        for piece in self.pieces:
            part = average[piece].to(torch.float32).mul_(share[piece, None])
            if not batch.no_rows:
                rows = batch.shard.weight[batch.local[piece]]
                part.addcmul_(rows.to(torch.float32), label[piece, None])
            message[piece] = part
        return self._shaped(message)

    def weight_gradient(self, loss_gradient: torch.Tensor) -> HeadWeightGradient:
        """Return T: the weight gradient, to run now or later. Only the optimizer depends on it."""
        g = self._flat(loss_gradient)
        self._spend_logits()
        return HeadWeightGradient(self, g, logits_differentiated=False)


class TwoBarriers(Normalised):
    """Compute both gradients from the loss's, exactly as an unsharded backward. The second barrier is the sum of dX."""

    @torch.no_grad()
    def input_gradient(self, loss_gradient: torch.Tensor) -> tuple[torch.Tensor, HeadWeightGradient]:
        """Run T: return this rank's part of the input gradient, ``[..., h]``, to be summed over the ranks, and the weight
        gradient, to run now or later.

        ``loss_gradient`` is the gradient of the training loss with respect to ``losses``, loss scale included.
        """
        g = self._flat(loss_gradient)
        self._spend_logits()
        message = self._message()
        for piece in self.pieces:
            message[piece] = self._logit_gradient(piece, g) @ self._batch.shard.weight
        later = HeadWeightGradient(self, g, logits_differentiated=self._batch.logits is not None)
        return self._shaped(message), later


@dataclass(frozen=True, eq=False)
class HeadWeightGradient(DeferredWeightGradient):
    """The product ``logit gradient^T @ x`` of one microbatch, as a ``DeferredWeightGradient``."""

    normalised: Normalised
    loss_gradient: torch.Tensor  # one number per token, fp32
    logits_differentiated: bool  # the kept logits have been replaced by their gradient

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that it holds, for the activation ledger."""
        return (*self.normalised.tensors, self.loss_gradient)

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradient to the parameter's. Called once."""
        normalised, batch = self.normalised, self.normalised._batch
        gradient = batch.shard.gradient
        if gradient is None:
            return
        if batch.logits is None:
            for piece in normalised.pieces:
                add_product(gradient, normalised._logit_gradient(piece, self.loss_gradient), batch.x[piece])
            return
        if not self.logits_differentiated:
            for piece in normalised.pieces:
                normalised._logit_gradient(piece, self.loss_gradient)
        if gradient.dtype == batch.x.dtype or gradient.device.type == "cuda":
            add_product(gradient, batch.logits, batch.x)
            return
        # fp32 copies hold one piece at a time, like all fp32 tensors of that size.
        for piece in normalised.pieces:
            add_product(gradient, batch.logits[piece], batch.x[piece])


def add_product(gradient: torch.Tensor, output_gradient: torch.Tensor, input: torch.Tensor) -> None:
    """Add ``output_gradient^T @ input`` to a gradient in place. An fp32 gradient gets the product of 16-bit factors unrounded.

    Only CUDA has such a product, from torch 2.8. Other devices multiply fp32 copies. That would be many times slower on
    CUDA, so with an older torch the product there is rounded to the factors' dtype.
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
    """Return the losses of a microbatch, in an object that computes its gradients.

    ``gathered`` has the ``statistics`` of all ranks, ``[ranks, 3, tokens]``, in the same order on every rank. ``into`` is
    memory for ``Normalised``.
    """
    maxima, sums, labels = gathered.unbind(1)
    maximum = maxima.amax(0)
    others = (sums * torch.exp(maxima - maximum)).sum(0)
    # One rank owns a token's label and the others have 0. No rank owns a label outside the vocabulary.
    label = torch.where(batch.valid, labels.sum(0) - maximum, 0.0)
    batch.own_sum.mul_(torch.exp(batch.own_maximum - maximum))
    kind = OneBarrier if batch.options.barriers == 1 else TwoBarriers
    return kind(batch, maximum, others, label, into)
