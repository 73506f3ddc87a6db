"""Pass over the logits of the LM head, once per phase, and compile these passes where torch can.

A pass is a plain function of one piece's logits as the matrix product gave them, ``[tokens, rows]``, and of numbers per token.
Run as it is, each of its operations reads and writes memory of that size. Compiled, it reads the logits once and writes what
takes their place once; nothing in fp32 of that size is ever in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

import torch

logger = logging.getLogger(__name__)

# The local softmax sums to this instead of 1 before it is rounded to 16 bit: with 1, most entries of a large vocabulary would
# be subnormal in fp16, and with the bare exponentials the product with the weights could overflow. A power of two is exact.
SOFTMAX_SUM = 1024.0

# Below it the sum is as good as nothing, and its inverse could overflow.
_SMALLEST_SUM = 1e-30


def transform(raw: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Return the logits in fp32, in memory of their own.

    Args:
        raw: what the matrix product gave, ``[tokens, rows]``.
        scale: factor of every logit.
        softcap: bound ``c`` of ``c tanh(logit / c)``, or ``None``.
    """
    logits = raw.to(torch.float32, copy=True)
    if scale != 1.0:
        logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


def slope(logits: torch.Tensor, softcap: float | None) -> torch.Tensor | float:
    """Return the derivative of the soft cap at transformed logits."""
    if softcap is None:
        return 1.0
    return logits.div(softcap).square_().neg_().add_(1)


def statistics(
    raw: torch.Tensor,
    local: torch.Tensor,
    owned: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run the pass of S: what the loss needs to know of these logits.

    Args:
        raw: what the matrix product gave, ``[tokens, rows]``, at least one row. Not modified.
        local: the label's row, ``[tokens]``; any row where it is not ``owned``.
        owned: whether the label's row is one of these, ``[tokens]``.
        scale, softcap: see ``HeadOptions``.
        softmax: whether the last result is wanted.

    Returns:
        The largest logit, the sum of the exponentials of all logits but the label's, relative to the largest, and the label's
        logit where ``owned``, else 0: fp32, ``[tokens]`` each. Last, for averages of the weights, those exponentials times the
        soft cap's slope, in ``raw``'s shape and dtype; without the slope they would sum to ``SOFTMAX_SUM``.
    """
    logits = transform(raw, scale, softcap)
    # The clamp keeps a row of nothing but -inf from becoming -inf - -inf.
    maximum = logits.amax(dim=1).clamp_(min=torch.finfo(torch.float32).min)
    label = torch.where(owned, logits.gather(1, local[:, None]).squeeze(1), 0.0)
    slopes = slope(logits, softcap) if softmax else 1.0
    # The label joins in fp32 when its probability is known: of one that is almost certain, sums and averages that
    # included it would leave rounding errors only.
    exponentials = _with_label(logits.sub_(maximum[:, None]).exp_(), local, owned, torch.zeros_like(maximum))
    others = exponentials.sum(dim=1)
    if not softmax:
        return maximum, others, label, None
    exponentials.mul_((SOFTMAX_SUM / others.clamp(min=_SMALLEST_SUM))[:, None])
    if softcap is not None:
        exponentials.mul_(slopes)
    return maximum, others, label, exponentials.to(raw.dtype)


def logit_gradient(
    raw: torch.Tensor,
    local: torch.Tensor,
    owned: torch.Tensor,
    maximum: torch.Tensor,
    factor: torch.Tensor,
    label: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """Run the pass of T: the gradient of what the matrix product gave takes its place.

    Args:
        raw, local, owned, scale, softcap: as in ``statistics``; ``raw`` is overwritten.
        maximum: what exponentials are relative to, fp32, ``[tokens]``.
        factor: of the exponentials, fp32, ``[tokens]``.
        label: the label's entry before the soft cap's slope, fp32, ``[tokens]``.
    """
    logits = transform(raw, scale, softcap)
    slopes = slope(logits, softcap)
    gradient = logits.sub_(maximum[:, None]).exp_().mul_(factor[:, None])
    gradient = _with_label(gradient, local, owned, label)
    if softcap is not None:
        gradient.mul_(slopes)
    raw.copy_(gradient)


def _with_label(matrix: torch.Tensor, local: torch.Tensor, owned: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the matrix with one value per token in the label's column, where this rank owns it; it may be modified in
    place.
    """
    column = local[:, None]
    if torch.compiler.is_compiling():
        # A scatter needs its matrix in memory. A comparison with each column's number becomes a part of the pass.
        columns = torch.arange(matrix.size(1), device=matrix.device)
        return torch.where((columns == column) & owned[:, None], values[:, None], matrix)
    return matrix.scatter_(1, column, torch.where(owned[:, None], values[:, None], matrix.gather(1, column)))


class Compiler:
    """Runs passes over logits: by ``torch.compile`` on the devices named, as they are elsewhere.

    A pass is compiled whole, once for any number of tokens, at its first run. Where compiling is switched off
    (``TORCHDYNAMO_DISABLE=1``) or fails, all passes run as they are from then on, and one line of the log says so.

    Args:
        devices: types of devices.
        backend: of ``torch.compile``.
    """

    def __init__(self, devices: Iterable[str] = ("cuda",), backend: str | Callable = "inductor"):
        self._devices, self._backend = frozenset(devices), backend
        self._compiled: dict[Callable, Callable] = {}
        self.gave_up = False
        """Whether passes run as they are where they should have been compiled."""

    def run(self, function: Callable, raw: torch.Tensor, *per_token: torch.Tensor, **constants):
        """Return ``function(raw, *per_token, **constants)``, compiled where torch can.

        Args:
            function: the pass.
            raw: logits as the matrix product gave them, ``[tokens, rows]``.
            per_token: tensors whose first dimension is the tokens'.
            constants: of the pass, by name.
        """
        if raw.device.type in self._devices and not self.gave_up:
            # Imported here, as it takes seconds, and only those who compile need it.
            from torch._dynamo import config, exc, maybe_mark_dynamic

            if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
                self._stay_eager("torch.compile is disabled")
                return function(raw, *per_token, **constants)
            for tensor in (raw, *per_token):
                maybe_mark_dynamic(tensor, 0)
            try:
                if function not in self._compiled:
                    self._compiled[function] = torch.compile(function, fullgraph=True, backend=self._backend)
                return self._compiled[function](raw, *per_token, **constants)
            # These come from compiling, so nothing has run yet that a second run would repeat.
            except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
                self._stay_eager(f"torch.compile failed ({(str(error).splitlines() or [''])[0]})")
        return function(raw, *per_token, **constants)

    def _stay_eager(self, reason: str) -> None:
        self.gave_up = True
        logger.warning(
            "%s: the vocabulary head's passes over logits run one operation at a time, which takes longer", reason
        )


COMPILER = Compiler()
"""Of this process."""
