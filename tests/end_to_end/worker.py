"""One rank: runs the cases that arrive on its connection and answers each.

Started by ``ranks.py``. A case may take the first ``ranks`` of them only. Cases with as many ranks share the groups that
Megatron makes for a layout, which take longer to make than a step; a case that fails ends its processes, and the groups with
them. The plugin's own are new in every case.
"""

from __future__ import annotations

import gc
import importlib
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

from megatron_pipemem.errors import with_code
from megatron_pipemem.tools.cpu import activate

GROUP_TIMEOUT = timedelta(hours=1)  # those who wait for it give up before (ranks.py)


def serve(program: str, connection: Connection, environment: dict[str, str]) -> None:
    """Run cases by ``program``'s ``run(case)`` until nobody asks any more."""
    os.environ.update(environment)
    activate()
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # The first checkpoint starts a server for a queue. Spawned ones would import torch once more for every rank.
    filesystem_async.get_write_results_queue = partial(filesystem_async.get_write_results_queue, mp_mode="fork")
    run = importlib.import_module(program).run
    gc.freeze()  # every case collects its garbage, and need not go through all of torch and Megatron for it
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    connection.send({"ready": True})
    groups: dict[tuple, dist.ProcessGroup] = {}
    parallel_state.create_group = _made_once(parallel_state.create_group, groups)
    members = worlds = 0
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        if members != (members := case.get("ranks", size)):
            if dist.is_initialized():
                dist.destroy_process_group()
                groups.clear()
            worlds += 1
            if rank < members:
                os.environ["WORLD_SIZE"] = str(members)
                own_store = dist.PrefixStore(str(worlds), store)
                dist.init_process_group("gloo", store=own_store, rank=rank, world_size=members, timeout=GROUP_TIMEOUT)
        if rank >= members:
            connection.send({"idle": True})
            continue
        try:
            reply = run(case)
            dist.barrier()
        except BaseException as error:
            reply = {"error": f"{traceback.format_exc()}{with_code(error)}"}
        connection.send(reply)


def _made_once(create: Callable, made: dict[tuple, object]) -> Callable:
    """Megatron's ``create_group``, noting in ``made`` what it need not make again."""

    def create_or_find(ranks: list[int], timeout: timedelta | None = None, backend: str | None = None, **others):
        if backend == "gloo":  # Megatron destroys these itself
            return create(ranks, timeout, backend, **others)
        key = (*ranks, timeout, backend, others.get("group_desc"))
        if key not in made:
            made[key] = create(ranks, timeout, backend, **others)
        return made[key]

    return create_or_find
