"""Recompute selectively: drop the results of cheap parts of a stage, and compute them again before the backward.

A *region* is a function of the stage that is cheap to run again. A ``Recorder`` records the forward of a stage. For the
backward, it keeps neither the tensors that autograd saves in a region nor the results of a region. Autograd gets empty
placeholders instead. ``Recorder.run_again`` fills them by running all regions again from their inputs. The graph is
that of the first forward, so gradients and hooks are the same as without recomputation.

The hooks for saved tensors replace any other hooks instead of nesting, because ``saved_as_is`` removes only the top
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.runtime.activation_ledger import saved_as_is, storage_key

Replay = Callable[[], AbstractContextManager]
"""Return a context in which random numbers repeat those of a region's first run."""


class Recorder:
    """Drops the results of one forward's regions, and computes them again. ``made`` is called with each of these."""

    def __init__(self, made: Callable[[torch.Tensor], object]):
        self._made = made
        self._regions: list[_Region] = []
        self._results: dict[int, _Result] = {}
        self._pack: Callable = torch.Tensor.detach
        self._unpack: Callable = lambda tensor: tensor

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the forward within a ``with`` block.

        Tensors that neither a region saves nor a region returns still go through the hooks that were set before.
        """
        global _recording
        outer, _recording = _recording, self
        self._pack, self._unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (
            self._pack,
            self._unpack,
        )
        try:
            with saved_as_is(), saved_tensors_hooks(self._save, self._load):
                yield
        finally:
            _recording = outer
            self._results.clear()

    def run_again(self) -> None:
        """Run all regions again, to fill the empty placeholders. Call this once, before the backward.

        A region that now saves another number of tensors raises a RuntimeError.
        """
        regions, self._regions = self._regions, []
        for region in regions:
            region.run_again(self._load, self._made)

    def run(self, function: Callable, replay: Replay, arguments: tuple) -> object:
        """Run a region now, record its inputs and results, and return its output.

        ``replay`` repeats its random numbers in a second run.
        """
        region = _Region(function, replay, [self._input(argument) for argument in arguments])
        with saved_as_is(), saved_tensors_hooks(region.save, _filled):
            output = function(*arguments)
        self._regions.append(region)
        inputs = {storage_key(argument) for argument in arguments if isinstance(argument, torch.Tensor)}
        for index, result in enumerate(_listed(output)):
            if isinstance(result, torch.Tensor) and storage_key(result) not in inputs:
                alive = StorageWeakRef(result.untyped_storage())
                self._results[storage_key(result)] = _Result(alive, region, index, result.dtype, result._version)
        return output

    def _input(self, argument: object) -> object:
        return _Input(self._save(argument), argument.requires_grad) if isinstance(argument, torch.Tensor) else argument

    def _save(self, tensor: torch.Tensor) -> object:
        result = self._results.get(storage_key(tensor))
        # If a result was freed or overwritten, its storage holds another value.
        if (
            result is None
            or result.alive.expired()
            or (result.dtype, result.version) != (tensor.dtype, tensor._version)
        ):
            return self._pack(tensor)
        place = _Placeholder()
        result.region.results.append(
            (ref(place), result.position, (tensor.shape, tensor.stride(), tensor.storage_offset()))
        )
        return place

    def _load(self, saved: object) -> torch.Tensor:
        return _filled(saved) if isinstance(saved, _Placeholder) else self._unpack(saved)


def region(function: Callable, replay: Callable[[], Replay]) -> Callable:
    """Wrap ``function`` so that it runs as a region while a forward is recorded, and as it is at other times.

    ``function`` must give the same result for the same tensors. All its arguments are positional, and it returns a
    tensor or a tuple. ``replay`` is called when a region begins. It saves the state of the random number generators,
    and returns the ``Replay`` for a second run.
    """

    def run_region(*arguments):
        if _recording is None or not torch.is_grad_enabled():
            return function(*arguments)
        return _recording.run(function, replay(), arguments)

    return run_region


def is_recording() -> bool:
    """Return whether a forward with recorded regions is running."""
    return _recording is not None


# Global like the queue of weight gradients, and set only while a forward runs.
_recording: Recorder | None = None


class _Placeholder:
    """A placeholder of a saved tensor. It is empty until the tensor is computed again."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None


class _Input(NamedTuple):
    saved: object
    requires_grad: bool

    def loaded(self, load: Callable) -> torch.Tensor:
        return load(self.saved).detach().requires_grad_(self.requires_grad)


class _Region:
    """One run of a region: its inputs, and the placeholders of its tensors that autograd still needs."""

    def __init__(self, function: Callable, replay: Replay, arguments: list):
        self._function, self._replay, self._arguments = function, replay, arguments
        self._saved: list[ref[_Placeholder]] = []
        self.results: list[tuple[ref[_Placeholder], int, tuple]] = []

    def save(self, tensor: torch.Tensor) -> _Placeholder:
        place = _Placeholder()
        self._saved.append(ref(place))
        return place

    def run_again(self, load: Callable, made: Callable[[torch.Tensor], object]) -> None:
        saved_again: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> None:
            saved_again.append(tensor.detach())

        arguments = [
            argument.loaded(load) if isinstance(argument, _Input) else argument for argument in self._arguments
        ]
        self._arguments = []
        with self._replay(), torch.enable_grad(), saved_as_is(), saved_tensors_hooks(collect, _filled):
            results = _listed(self._function(*arguments))
        if len(saved_again) != len(self._saved):
            raise RuntimeError(
                f"a part of the model saved {len(self._saved)} tensors for its backward, but {len(saved_again)} when it ran "
                "again; the part is not deterministic, so recompute its stage fully (--pipemem-recompute full) or not "
                "at all"
            )
        for saved, tensor in zip(self._saved, saved_again, strict=True):
            _fill(saved, tensor, made)
        for saved, index, geometry in self.results:
            _fill(saved, results[index].detach().as_strided(*geometry), made)


def _fill(saved: ref[_Placeholder], tensor: torch.Tensor, made: Callable[[torch.Tensor], object]) -> None:
    place = saved()
    if place is not None:
        place.tensor = tensor
        made(tensor)


class _Result(NamedTuple):
    """A tensor that a region has returned, identified by its storage and version."""

    alive: StorageWeakRef
    region: _Region
    position: int
    dtype: torch.dtype
    version: int


def _filled(place: _Placeholder) -> torch.Tensor:
    if place.tensor is None:
        raise RuntimeError("a backward began before the selective recompute (RS) of its forward")
    return place.tensor


def _listed(result: object) -> tuple:
    return result if isinstance(result, tuple) else (result,)
