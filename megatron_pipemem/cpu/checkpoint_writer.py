"""Write checkpoints in the background on the CPU (``--async-save --async-strategy mcore``).

Megatron's writer is a new process, which looks for its GPU, and training goes on as soon as tensors have been copied to the
host. Here the writer is forked, with the lane as it is, and copies what is on the host already.
"""

from __future__ import annotations


def _copied(write_buckets: list, non_blocking: bool = True) -> list:
    """Copy a plan's tensors, which training would go on to change, in the place of Megatron's ``preload_tensors``.

    Args:
        write_buckets: files with their bytes and tensors.
        non_blocking: unused.
    """
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in write_buckets
    ]


def install() -> None:
    """Replace how Megatron starts its persistent writer, and how the writer takes its tensors."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    start = PersistentAsyncCaller._get_process.__func__
    PersistentAsyncCaller._get_process = classmethod(
        lambda caller, rank, mp_mode="fork", *priorities: start(caller, rank, "fork", *priorities)
    )
    FileSystemWriterAsync.preload_tensors = staticmethod(_copied)
