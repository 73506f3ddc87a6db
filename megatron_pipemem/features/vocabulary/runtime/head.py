"""Compute the LM head with its cross entropy: one rank's rows, phase by phase.

One microbatch goes through a chain of objects, one per phase:

    scored = head.score(x, labels)                          # S: local logits and their statistics
    gathered = gather_statistics(scored.statistics).wait()
    done = combine(scored, gathered)                        # done.losses, then the gradients

Nothing here communicates, and nothing is recorded by autograd. With logits y (scaled and capped), their maximum M over the
whole vocabulary, S = sum exp(y - M), Z = log S + M:

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
    """Say what the head computes, and how.

    Args:
        barriers: collectives that the last stage's backward waits for one after another. 1 forms the input gradient from
            statistics before the loss is known (the paper's Algorithm 2), 2 after it (its Algorithm 1).
        piece_tokens: tokens whose logits are in fp32 at a time; ``None`` for the whole microbatch. Pieces change results only
            where matrix products of other sizes round differently.
        keep_logits: keep the logits until their gradient is taken, in the parameter's dtype, ``[tokens, rows]``. ``False``
            computes them again, piece by piece: one more matrix product for each use, and nothing of that size is ever held.
        scale: factor of the logits.
        softcap: ``c`` of ``c * tanh(logits / c)``, applied after ``scale``; ``None`` for none.
        z_loss: factor of the square of the log-partition function, added to every token's loss.
        message_dtype: of the partial input gradients that are summed over the ranks. 16 bit halves the message and rounds
            once per rank.
        compiled: compile the passes over logits on CUDA, see ``kernels.Compiler``. ``False`` runs one operation at a time.
    """

    barriers: int = 1
    piece_tokens: int | None = None
    keep_logits: bool = True
    scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    message_dtype: torch.dtype = torch.float32
    compiled: bool = True

    def __post_init__(self) -> None:
        for holds, what in (
            (self.barriers in (1, 2), f"barriers={self.barriers}: give 1 or 2"),
            (
                self.piece_tokens is None or self.piece_tokens >= 1,
                f"piece_tokens={self.piece_tokens}: at least 1, or None",
            ),
            (
                self.softcap is None or self.softcap > 0,
                f"softcap={self.softcap}: a positive number, or None for no cap",
            ),
            (self.z_loss >= 0, f"z_loss={self.z_loss}: at least 0"),
        ):
            if not holds:
                raise VocabularyError("bad-number", what)

    def pieces(self, tokens: int) -> Iterator[slice]:
        """Return the tokens of a microbatch, piece by piece."""
        size = self.piece_tokens or max(tokens, 1)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


@dataclass(eq=False)
class HeadMicrobatch:
    """State of the head, per token of one microbatch.

    Args:
        shard: of the head's matrix, this rank's.
        options: of the head.
        x: input, ``[tokens, h]``.
        shape: of the labels as they were given.
        local: the label's row within this shard, 0 where it is another's.
        owned: whether the label's row is in this shard.
        valid: whether the label is in the vocabulary at all.
        statistics: fp32, ``[3, tokens]``: the largest logit of this shard (``own_maximum``), the sum of the exponentials of its
            logits but the label's (``own_sum``), relative to ``own_maximum`` and later to the maximum of all ranks, and the
            label's logit where ``owned``, else 0 (``target_logit``).
        for_backward: whether gradients will be asked for.
        logits: what the matrix product gave, ``[tokens, rows]``; its gradient once that has been taken. ``None`` if not kept.
        average: rows of the weights averaged by the local softmax (times ``SOFTMAX_SUM``), the label's row left out,
            ``[tokens, h]``: the input gradient of the one-barrier algorithm but for factors per token.
    """

    shard: WeightShard
    options: HeadOptions
    x: torch.Tensor
    shape: torch.Size
    local: torch.Tensor
    owned: torch.Tensor
    valid: torch.Tensor
    statistics: torch.Tensor
    for_backward: bool
    logits: torch.Tensor | None = None
    average: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what is kept, for the activation ledger."""
        kept = (self.x, self.local, self.owned, self.valid, self.statistics, self.logits, self.average)
        return tuple(tensor for tensor in kept if tensor is not None)

    def __post_init__(self) -> None:
        self.own_maximum, self.own_sum, self.target_logit = self.statistics

    @property
    def no_rows(self) -> bool:
        """Return whether this shard is empty: more ranks than rows."""
        return not self.shard.rows

    def score(self, piece: slice, raw: torch.Tensor) -> None:
        """Compute the statistics of a piece of the tokens, from its logits."""
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
        """Run a pass of ``kernels`` over the logits of a piece of the tokens, compiled where that is asked for.

        Args:
            function: the pass.
            piece: of the tokens.
            raw: logits of the piece as the matrix product gave them, ``[tokens, rows]``.
            per_token: numbers per token of the piece, ``[tokens]`` each.
            constants: of the pass, by name.
        """
        options = self.options
        tensors = raw, self.local[piece], self.owned[piece], *per_token
        constants |= {"scale": options.scale, "softcap": options.softcap}
        if options.compiled:
            return kernels.COMPILER.run(function, *tensors, **constants)
        return function(*tensors, **constants)


@dataclass(frozen=True)
class VocabularyHead:
    """One rank's share of the LM head. Bias, label smoothing and fp8 are not supported.

    Args:
        shard: of the head's matrix; the embedding's very shard when tied.
        options: the same on every rank.
    """

    shard: WeightShard
    options: HeadOptions = field(default_factory=HeadOptions)

    @torch.no_grad()
    def score(self, x: torch.Tensor, labels: torch.Tensor, *, for_backward: bool = True) -> HeadMicrobatch:
        """Run S: the logits of this rank's rows, and what the loss needs to know of them.

        Args:
            x: input of the head, ``[..., h]`` in the parameter's dtype, the same on every rank. Not modified, and must not be
                until the weight gradient has run.
            labels: ``[...]``. A label outside the vocabulary, for example -100, is ignored: loss 0, no gradient.
            for_backward: ``False`` for evaluation: nothing is kept for gradients.
        """
        if labels.shape != x.shape[:-1]:
            raise VocabularyError(
                "wrong-shape",
                f"labels of shape {tuple(labels.shape)} for an input of shape {tuple(x.shape)}: they need all of its "
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

        ``collectives.gather_logits`` makes the whole vocabulary's of them.
        """
        rows = self._rows_of(x)
        logits = rows.new_empty(rows.size(0), len(self.shard.rows))
        for piece in self.options.pieces(rows.size(0)):
            raw = rows[piece] @ self.shard.weight.t()
            logits[piece] = kernels.transform(raw, self.options.scale, self.options.softcap)
        return logits.view(*x.shape[:-1], logits.size(1))

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, h]``, without a graph."""
        parameter = self.shard.parameter
        if x.size(-1) != parameter.size(1) or x.dtype != parameter.dtype:
            raise VocabularyError(
                "wrong-shape",
                f"input of shape {tuple(x.shape)} in {x.dtype} for a head of hidden size {parameter.size(1)} in "
                f"{parameter.dtype}: both must agree",
            )
        return x.detach().reshape(-1, x.size(-1))


_TIE = 1e-5
"""Logits this close are taken for equal."""


@torch.no_grad()
def finish_input_gradient(
    total: torch.Tensor, dtype: torch.dtype, loss_gradient: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of the training loss by the head's input, ``[..., h]``, on the rank that has the sum over the
    ranks.

    Args:
        total: sum of all ranks' parts, ``[..., h]``.
        dtype: of the head's input.
        loss_gradient: ``Normalised.without_ignored``, ``[...]``, for the parts of one barrier, which lack it.
    """
    return (total if loss_gradient is None else total * loss_gradient.unsqueeze(-1)).to(dtype)


class Normalised:
    """Hold the losses of one microbatch, which are the same on every rank.

    Args:
        batch: what this rank keeps of the microbatch.
        maximum: of the logits over the whole vocabulary, ``[tokens]``.
        others: sum of exp(logit - maximum) over all rows but the label's, ``[tokens]``.
        label: the label's logit minus the maximum, ``[tokens]``.
        into: fp32 ``[NUMBERS, tokens]``, memory for what is kept per token; ``None`` takes new memory.
    """

    NUMBERS = 5
    """Kept per token."""

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
        # log(1 + others / exp(label)): a label that is almost certain keeps a small but precise loss.
        nll = torch.nn.functional.softplus(torch.log(others) - label)
        z = self.options.z_loss
        # The label's entry, without the cancellation of a probability near 1, and the factor of all others.
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
        """fp32, in the labels' shape."""
        return self._losses.view(self._batch.shape)

    @property
    def hits(self) -> torch.Tensor:
        """Return which labels are the likeliest tokens, in the labels' shape; a tie within rounding counts."""
        # exp(label - maximum), from what is kept.
        return (self._total * torch.exp(-self._losses) >= 1 - _TIE).view(self._batch.shape)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what is kept until the gradients have been taken, for the activation ledger."""
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
        """Return the loss gradient, one per token in fp32, without ignored tokens."""
        batch = self._batch
        if loss_gradient.numel() != batch.valid.numel():
            raise VocabularyError(
                "wrong-shape",
                f"loss gradient of shape {tuple(loss_gradient.shape)} for losses of shape {tuple(batch.shape)}: give one "
                "number per token",
            )
        return loss_gradient.detach().reshape(-1).to(torch.float32).masked_fill(~batch.valid, 0)

    def _spend_logits(self) -> None:
        """Mark the logits as spent: their gradient takes their place, so it can be taken once."""
        if not self._gradients_left:
            raise _taken_already()
        self._gradients_left = False

    def _logit_gradient(self, piece: slice, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of what the matrix product gave, for one piece, in the parameter's dtype; replaces kept
        logits.
        """
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
        "this gradient of the microbatch was taken already, or score() was told for_backward=False: take each gradient once",
    )


class OneBarrier(Normalised):
    """Input gradient from statistics alone, before ``g`` is known; the weight gradient at any time when it is."""

    @property
    def owes_input_gradient(self) -> bool:
        """Return whether the input gradient has not been taken yet."""
        return self._batch.average is not None

    @torch.no_grad()
    def input_gradient(self) -> torch.Tensor:
        """Return this rank's part of the gradient of the losses by the head's input, ``[..., h]``, to be summed over
        the ranks.

        It lacks ``g``: ``finish_input_gradient`` turns the sum into the gradient of the training loss.
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
        """Return T: the weight gradient, to run now or later; nothing depends on it but the optimizer."""
        g = self._flat(loss_gradient)
        self._spend_logits()
        return HeadWeightGradient(self, g, logits_differentiated=False)


class TwoBarriers(Normalised):
    """Both gradients from the loss's: exactly what an unsharded backward computes, and the second barrier is the sum of dX."""

    @torch.no_grad()
    def input_gradient(self, loss_gradient: torch.Tensor) -> tuple[torch.Tensor, HeadWeightGradient]:
        """Run T: return this rank's part of the gradient of the training loss by the head's input, and the weight
        gradient.

        Args:
            loss_gradient: gradient of the training loss by ``losses``, the loss scale included.

        Returns:
            ``[..., h]``, to be summed over the ranks, and the weight gradient, to run now or later.
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
    """``logit gradient^T @ x`` of one microbatch: a ``DeferredWeightGradient``.

    Args:
        normalised: the microbatch.
        loss_gradient: one per token, fp32.
        logits_differentiated: whether what is kept as logits is their gradient by now.
    """

    normalised: Normalised
    loss_gradient: torch.Tensor
    logits_differentiated: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what waits with it, for the activation ledger."""
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
        # Copies in fp32 are of one piece at a time, as all of that size are.
        for piece in normalised.pieces:
            add_product(gradient, batch.logits[piece], batch.x[piece])


def add_product(gradient: torch.Tensor, output_gradient: torch.Tensor, input: torch.Tensor) -> None:
    """Add ``output_gradient^T @ input`` to a gradient. An fp32 gradient gets the product of 16-bit factors unrounded.

    Only CUDA has such a product, from torch 2.8. Elsewhere it is that of fp32 copies; with an older torch on CUDA,
    where that takes many times as long, it is rounded to the factors' dtype.

    Args:
        gradient: ``[rows, h]``, changed in place.
        output_gradient: of the logits, ``[tokens, rows]``.
        input: of the head, ``[tokens, h]``.
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
    """Return the losses, and the way to the gradients: a ``OneBarrier`` or a ``TwoBarriers``, as the options say.

    Args:
        batch: what this rank has scored.
        gathered: the ``statistics`` of all ranks, ``[ranks, 3, tokens]``, in the same order on every rank.
        into: fp32, ``[Normalised.NUMBERS, tokens]``: memory for what is kept per token, new by default.
    """
    maxima, sums, labels = gathered.unbind(1)
    maximum = maxima.amax(0)
    others = (sums * torch.exp(maxima - maximum)).sum(0)
    # One rank owns a token's label, the others say 0; nobody owns a label outside the vocabulary.
    label = torch.where(batch.valid, labels.sum(0) - maximum, 0.0)
    batch.own_sum.mul_(torch.exp(batch.own_maximum - maximum))
    kind = OneBarrier if batch.options.barriers == 1 else TwoBarriers
    return kind(batch, maximum, others, label, into)
