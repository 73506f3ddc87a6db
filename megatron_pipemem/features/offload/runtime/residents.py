"""Say which saved tensors stay on the device whatever is offloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.runtime.activation_ledger import data_of, is_quantised, storage_key


class Residents:
    """Tells the saved tensors that stay on the device from those that may leave it.

    Args:
        device: whose activations may leave.
        min_bytes: storages below this stay.

    Attributes:
        stayed: bytes of the tensors that stay, per reason, since the step began.
    """

    def __init__(self, device: torch.device, min_bytes: int):
        self._device = device
        self._min_bytes = max(1, min_bytes)
        self.begin_step(())

    def begin_step(self, permanent: Iterable[torch.Tensor]) -> None:
        """Forget the step before.

        Args:
            permanent: tensors that are no activations.
        """
        self._permanent = {storage_key(part) for tensor in permanent for part in data_of(tensor)}
        self._excluded: dict[int, StorageWeakRef] = {}
        self.stayed: Counter[str] = Counter()

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """These stay for the rest of the step, as long as they live."""
        for part in (part for tensor in tensors for part in data_of(tensor)):
            self._excluded[storage_key(part)] = StorageWeakRef(part.untyped_storage())

    def stays(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor stays, and count it if so."""
        reason = self._reason_to_stay(tensor)
        if reason is not None and tensor.layout is torch.strided:
            self.stayed[reason] += sum(part.nbytes for part in data_of(tensor))
        return reason is not None

    def _reason_to_stay(self, tensor: torch.Tensor) -> str | None:
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return "permanent"
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        if is_quantised(tensor):
            return self._whose(tensor) or "unsupported"
        if not plain or tensor.is_conj() or tensor.is_neg():
            return "unsupported"
        if tensor.device != self._device:
            return "other device"
        if tensor.numel() == 0 or tensor.untyped_storage().nbytes() < self._min_bytes:
            return "small"
        return self._whose(tensor)

    def _whose(self, tensor: torch.Tensor) -> str | None:
        for key in map(storage_key, data_of(tensor)):
            if key in self._permanent:
                return "permanent"
            excluded = self._excluded.get(key)
            if excluded is not None and not excluded.expired():
                return "batch"
        return None
