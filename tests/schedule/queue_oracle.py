"""Plays lowered programs on ranks that have one hardware queue each, apart from the package's own lowering and checks.

``CUDA_DEVICE_MAX_CONNECTIONS=1`` puts whatever a rank launches, on all of its streams, into one queue. What stands at its head
leaves it when it may start, and nothing behind it starts before. A rank has a stream for computing and one for every directed
edge. A message moves when both ends have started; whoever has started it holds up the stream of that edge until then.

``strict`` asks for more than any hardware does: nothing leaves the queue before it has ended, and messages have ended when
both ends are at the heads of their queues.
"""

from __future__ import annotations

from collections.abc import Hashable

from megatron_pipemem.schedule.schedule import Program


def stuck(program: Program, strict: bool = False) -> list[str]:
    """The heads of the queues that are not empty in the end; empty when the program ends."""
    queues = [list(actions) for actions in program.actions]
    size = program.placement.model_stages
    under_way: list[list[int]] = [[] for _ in queues]  # positions that have started and not ended
    met: dict[Hashable, set[int]] = {}
    head = [0] * len(queues)

    def meeting(action) -> tuple[Hashable, int] | None:
        """What several devices do together, and how many of them."""
        kind, stage, microbatch = action
        name = kind.value
        if name in ("SEND_F", "RECV_F"):
            return ("F", stage + (name == "SEND_F"), microbatch), 2
        if name in ("SEND_I", "RECV_I"):
            return ("I", stage - (name == "SEND_I"), microbatch), 2
        if name == "REDUCE_REPLICAS":
            return ("SUM", stage % size), len(program.placement.holders(stage))
        if name.startswith(("REDUCE_E", "REDUCE_X", "BCAST", "STATS")):
            return (name, microbatch), len(queues)
        return None

    def stream(device: int, action) -> Hashable:
        kind, stage, _ = action
        devices = program.placement.devices
        found = meeting(action)
        if found is None:
            return "compute"
        if found[1] != 2 or kind.value == "REDUCE_REPLICAS":
            return "SUM" if kind.value == "REDUCE_REPLICAS" else "collectives"
        other = stage + 1 if kind.value in ("SEND_F", "RECV_I") else stage - 1
        edge = (device, devices[other]) if kind.value.startswith("SEND") else (devices[other], device)
        return edge

    def ended(device: int, position: int) -> bool:
        found = meeting(queues[device][position])
        return found is None or len(met[found[0]]) >= found[1]

    def may_start(device: int, position: int) -> bool:
        action = queues[device][position]
        own = stream(device, action)
        under_way[device] = [each for each in under_way[device] if not ended(device, each)]
        for earlier in under_way[device]:
            kind, stage, microbatch = queues[device][earlier]
            # Whoever consumes a message waits for it; what else an action needs stands before it on the device.
            consumers = {"RECV_F": "F", "RECV_I": "IB"}.get(kind.value, "")
            is_consumer = own == "compute" and action[0].value in consumers and action[1:] == (stage, microbatch)
            if strict or is_consumer or stream(device, queues[device][earlier]) in (own, "compute"):
                return False
        return True

    moved = True
    while moved:
        moved = False
        for device, queue in enumerate(queues):
            while head[device] < len(queue) and may_start(device, head[device]):
                under_way[device].append(head[device])
                if found := meeting(queue[head[device]]):
                    met.setdefault(found[0], set()).add(device)
                head[device] += 1
                moved = True
    return [f"{queues[d][at]} on device {d}" for d, at in enumerate(head) if at < len(queues[d])] or [
        f"{queues[d][at]} on device {d}"
        for d, open_ones in enumerate(under_way)
        for at in open_ones
        if not ended(d, at)
    ]
