"""Compute the LM head's losses and gradients, once the statistics of all ranks are known.

With logits y (scaled and capped), their maximum M over the whole vocabulary, S = sum exp(y - M), Z = log S + M:

    loss = log S - (y_label - M) + z Z^2            dloss/dy = (1 + 2zZ) exp(y - M) / S - onehot(label)

Input gradients are first partial: sums over this rank's rows, to be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.features.vocabulary.runtime import kernels
from megatron_pipemem.features.vocabulary.runtime.microbatch import HeadMicrobatch
from megatron_pipemem.features.vocabulary.runtime.options import HeadOptions
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient

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
