"""One rank: runs the cases that arrive on its standard input, answers each by a line of JSON on its standard output.

Started by ``ranks.py``. Every case has process groups of its own, so nothing of one reaches the next. A case may take the first
``ranks`` of them only.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from datetime import timedelta

from megatron_pipemem.cpu import activate

GROUP_TIMEOUT = timedelta(seconds=200)


def serve(program: str) -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    activate()
    import torch.distributed as dist

    run = importlib.import_module(program).run
    gc.freeze()  # every case collects its garbage, and need not go through all of torch and Megatron for it
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    print(json.dumps({"ready": True}), file=replies)
    for number, line in enumerate(sys.stdin):
        case = json.loads(line)
        members = case.get("ranks", size)
        if rank >= members:
            print(json.dumps({"idle": True}), file=replies)
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
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    serve(sys.argv[1])
