"""Replace NCCL's process groups by gloo's, with little use of a rank's processor and memory."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import Work, distributed_c10d

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
)
_GATHERS = ("all_gather_into_tensor", "all_gather_single")
_RELEASE_SECONDS = 1.0


def _on_one_device(create: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of gloo's process groups so that all share the gloo device of the first, with one thread each.

    PyTorch gives every group its own device, whose thread wakes up a hundred times per second. Megatron makes dozens of
    groups. With 60 of them, four idle ranks keep a quarter of a core busy. Two threads for each group's collectives, which are
    in the same order on all ranks, add up to more than some machines let a user start.
    """
    devices: list = []

    @functools.wraps(create)
    def wrapper(group: Any, *args: Any, **kwargs: Any) -> None:
        if not devices or kwargs.keys() != {"timeout"}:  # PyTorch itself makes all groups with this keyword
            create(group, *args, **kwargs)
            if not devices:
                devices.extend(group.options._devices)
            return
        options = group._Options()
        options._devices, options._timeout, options._threads = devices, kwargs["timeout"], 1
        create(group, *args, options)

    return wrapper


def _over_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes process groups: NCCL becomes gloo, and arguments that gloo lacks are dropped."""

    @functools.wraps(create)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        settings = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
        if "backend" in settings:
            settings["backend"] = _gloo(settings["backend"])
        return create(*map(_gloo, args), **settings)

    return wrapper


def _gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend


def _releasing(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that gloo holds none of its tensors after the wait.

    A thread of gloo releases its tensors some time after a collective is complete, because it needs the interpreter's
    lock. Until then it holds memory that the program has freed, and byte counts differ between runs. Here the thread
    gets new tensor objects with the same storage, and ``wait`` waits until the thread has released them. If they were
    released here earlier, PyTorch would hand the Python object to the thread without a lock, which corrupts memory.
    Collectives that PyTorch coalesces run unchanged, but for gathers: gloo would make one tensor of all parts, and so
    convert the numbers of some if their types differ. It gets their bytes.
    """

    @functools.wraps(collective)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        lent: list[torch.Tensor] = []
        if distributed_c10d._world.pg_coalesce_state:  # it starts only when others have joined it
            if collective.__name__ in _GATHERS:
                args = tuple(_bytes(args, lent))
                kwargs = dict(zip(kwargs, _bytes(kwargs.values(), lent), strict=True))
                _keep(lent)
            return collective(*args, **kwargs)
        work = collective(*_lend(args, lent), **dict(zip(kwargs, _lend(tuple(kwargs.values()), lent), strict=True)))
        if isinstance(work, Work):
            return _ReleasingWork(work, lent)
        _await_release(lent)
        return work

    return wrapper


def _lend(values: Sequence[Any], lent: list[torch.Tensor]) -> list[Any]:
    """Return a list of the values, with a new tensor object for every dense tensor, also in nested lists and tuples.

    Add the new tensor objects to ``lent``. They share the storages of the old ones.
    """
    copies = []
    for value in values:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
            value = value.detach()
            lent.append(value)
        elif type(value) in (list, tuple):
            value = _lend(value, lent)
        copies.append(value)
    return copies


def _bytes(values: Iterable[Any], lent: list[torch.Tensor]) -> list[Any]:
    """Return a list of the values, with the bytes of each tensor in its place. Add these to ``lent``."""
    viewed = [value.view(-1).view(torch.uint8) if isinstance(value, torch.Tensor) else value for value in values]
    lent += [value for value in viewed if isinstance(value, torch.Tensor)]
    return viewed


def _await_release(lent: list[torch.Tensor]) -> None:
    """Wait until gloo has released these tensors, at most one second, and empty the list.

    Tensors that are not released by then go to ``_keep``, because a caller may hold one.
    """
    patience = time.monotonic() + _RELEASE_SECONDS
    while lent:
        # References in Python: the list and the argument of the call. In C++: the Python object.
        is_ours = sys.getrefcount(lent[-1]) == 2 and _held_by_python_alone(lent[-1])
        if is_ours:
            del lent[-1]
        elif time.monotonic() > patience:
            _keep(lent)
        else:
            time.sleep(0)


_late: list[torch.Tensor] = []
"""Tensors that gloo's threads may still hold although their collective is complete."""


def _keep(lent: list[torch.Tensor]) -> None:
    """Empty the list, and keep its tensors elsewhere until gloo has released them."""
    _late[:] = [group for group in (*_late, *lent) if not _held_by_python_alone(group)]
    lent.clear()


def _held_by_python_alone(tensor: torch.Tensor) -> bool:
    return tensor._use_count() == 1  # type: ignore[attr-defined]


class _ReleasingWork(Work):
    """A running collective, which holds neither its tensors nor its result after ``wait``."""

    def __init__(self, work: Work, lent: list[torch.Tensor]):
        super().__init__()
        self._work: Work | None = work
        self._lent = lent

    def __del__(self) -> None:
        _keep(self._lent)  # if the collective was never waited for

    def wait(self, *timeout: timedelta) -> bool:
        if self._work is not None:
            self._work.wait(*timeout)
            self._work = None
            _await_release(self._lent)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return self._work is None or self._work.is_success()

    def exception(self) -> Any:
        return None if self._work is None else self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return super().result() if self._work is None else self._hand_out_work().result()

    def get_future(self) -> torch.futures.Future:
        return super().get_future() if self._work is None else self._hand_out_work().get_future()

    def _hand_out_work(self) -> Any:
        """Return gloo's work, for a caller that may keep its tensors. A later ``wait`` does not await their release."""
        _keep(self._lent)
        return self._work


def install() -> None:
    """Make torch.distributed use gloo in place of NCCL, for the rest of the process.

    Functions that make groups make gloo groups. Collectives release their tensors when they end (``_releasing``). All
    gloo groups of this process share one gloo device.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    gloo.__init__ = _on_one_device(gloo.__init__)
    makers = ("init_process_group", "new_group")
    collectives = [name for name in _COLLECTIVES if hasattr(distributed_c10d, name)]  # older versions lack some
    for names, wrap in ((makers, _over_gloo), (collectives, _releasing)):
        for name in names:
            wrapped = wrap(getattr(distributed_c10d, name))
            for module in (distributed_c10d, torch.distributed):
                setattr(module, name, wrapped)
