"""One rank: runs the cases that arrive on its connection and answers each.

Started by ``ranks.py``. Every case has process groups of its own, so nothing of one reaches the next. A case may take the first
``ranks`` of them only.
"""

from __future__ import annotations

import gc
import importlib
import os
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

from megatron_pipemem.cpu import activate

GROUP_TIMEOUT = timedelta(seconds=200)


def serve(program: str, connection: Connection, environment: dict[str, str]) -> None:
    """Run cases by ``program``'s ``run(case)`` until nobody asks any more."""
    os.environ.update(environment)
    activate()
    import torch.distributed as dist

    run = importlib.import_module(program).run
    gc.freeze()  # every case collects its garbage, and need not go through all of torch and Megatron for it
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    connection.send({"ready": True})
    number = 0
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        number += 1
        members = case.get("ranks", size)
        if rank >= members:
            connection.send({"idle": True})
            continue
        os.environ["WORLD_SIZE"] = str(members)
        own_store = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=own_store, rank=rank, world_size=members, timeout=GROUP_TIMEOUT)
        try:
            reply = run(case)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            reply = {"error": traceback.format_exc()}
        connection.send(reply)
