"""Functions over the logits of the LM head, one per phase, compiled by torch if possible.

Each is a plain function of the logits of one piece of the tokens, ``[tokens, rows]``, and of numbers per token. Without
compiling, each operation in it reads and writes memory of the size of the logits. Compiled, the function reads the
logits once and writes its result once, and needs no fp32 tensor of that size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

import torch

logger = logging.getLogger(__name__)

# The local softmax sums to this number before it is rounded to 16 bit. With 1, most entries of a large vocabulary would be
# subnormal in fp16. With unscaled exponentials, the product with the weights could overflow. A power of two is exact.
SOFTMAX_SUM = 1024.0

# A smaller sum counts as zero, and its inverse could overflow.
_SMALLEST_SUM = 1e-30


def transform(raw: torch.Tensor, scale: float) -> torch.Tensor:
    """Return logits times ``scale``, in new fp32 memory."""
    logits = raw.to(torch.float32, copy=True)
    if scale != 1.0:
        logits.mul_(scale)
    return logits


def statistics(
    raw: torch.Tensor,
    label_row: torch.Tensor,
    owned: torch.Tensor,
    *,
    scale: float,
    softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the statistics that the loss needs, ``[tokens]`` each, and the softmax for the input gradient.

    ``raw`` are logits from the matrix product, ``[tokens, rows]``, with at least one row. They are not modified.
    ``owned`` says whether the label's row is on this rank. ``label_row`` is the number of that row on this rank, or any row
    if not ``owned``.

    The first three results are fp32: the largest logit; the sum of exp(logit - largest) over all rows except the
    label's; and the label's logit if ``owned``, else 0.

    The fourth result is ``None`` unless ``softmax`` is set. It is used to average the rows of the weight, and has the
    shape and dtype of ``raw``. It is exp(logit - largest), with 0 for the label, scaled such that each token's sum is
    ``SOFTMAX_SUM``.
    """
    logits = transform(raw, scale)
    # The clamp keeps a row of only -inf from becoming -inf - -inf.
    maximum = logits.amax(dim=1).clamp_(min=torch.finfo(torch.float32).min)
    label = torch.where(owned, logits.gather(1, label_row[:, None]).squeeze(1), 0.0)
    # The label is added in fp32 when its probability is known. Sums and averages that included an almost certain label would
    # lose all other digits to rounding.
    exponentials = _with_label(logits.sub_(maximum[:, None]).exp_(), label_row, owned, torch.zeros_like(maximum))
    others = exponentials.sum(dim=1)
    if not softmax:
        return maximum, others, label, None
    exponentials.mul_((SOFTMAX_SUM / others.clamp(min=_SMALLEST_SUM))[:, None])
    return maximum, others, label, exponentials.to(raw.dtype)


def logit_gradient(
    raw: torch.Tensor,
    label_row: torch.Tensor,
    owned: torch.Tensor,
    maximum: torch.Tensor,
    factor: torch.Tensor,
    label_gradient: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Replace the logits ``raw``, ``[tokens, rows]``, by the gradient of the loss with respect to them.

    The gradient is ``factor * exp(logit - maximum)``, and ``label_gradient`` at the label's row. ``factor``, ``maximum`` and
    ``label_gradient`` are fp32, ``[tokens]``. See ``statistics`` for the others.
    """
    gradient = transform(raw, scale).sub_(maximum[:, None]).exp_().mul_(factor[:, None])
    raw.copy_(_with_label(gradient, label_row, owned, label_gradient))


def _with_label(
    matrix: torch.Tensor, label_row: torch.Tensor, owned: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return ``matrix`` with each token's value from ``values`` in the label's column, if ``owned``. It may be changed
    in place.
    """
    column = label_row[:, None]
    if torch.compiler.is_compiling():
        # A scatter needs its matrix in memory, but a comparison with each column's number is compiled into the pass.
        columns = torch.arange(matrix.size(1), device=matrix.device)
        return torch.where((columns == column) & owned[:, None], values[:, None], matrix)
    return matrix.scatter_(1, column, torch.where(owned[:, None], values[:, None], matrix.gather(1, column)))


class Compiler:
    """Runs functions over logits, compiled by ``torch.compile`` if the tensors are on one of these types of devices.

    A function is compiled once, at its first run, for any number of tokens. If compiling is disabled
    (``TORCHDYNAMO_DISABLE=1``) or fails, all later runs are not compiled, and the log says so once.
    """

    def __init__(self, devices: Iterable[str] = ("cuda",), backend: str | Callable = "inductor"):
        self._devices, self._backend = frozenset(devices), backend
        self._compiled: dict[Callable, Callable] = {}
        self.gave_up = False
        """Whether functions run without compiling because compiling is disabled or has failed."""

    def run(self, function: Callable, raw: torch.Tensor, *per_token: torch.Tensor, **constants):
        """Return ``function(raw, *per_token, **constants)``, compiled if possible. ``raw`` is ``[tokens, rows]``."""
        if raw.device.type in self._devices and not self.gave_up:
            # Imported here, because the import takes seconds and only compiling needs it.
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
            # These errors come from compiling, so the pass has not run yet.
            except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
                self._stay_eager(f"torch.compile failed ({(str(error).splitlines() or [''])[0]})")
        return function(raw, *per_token, **constants)

    def _stay_eager(self, reason: str) -> None:
        self.gave_up = True
        logger.warning(
            "%s: the vocabulary head's passes over logits run one operation at a time, which is slower", reason
        )


COMPILER = Compiler()
"""The compiler that this process uses for functions over logits."""
