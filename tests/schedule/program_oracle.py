"""A second opinion on lowered programs, written apart from the package's lowering and validator on purpose.

It plays the transport literally: every device walks its program, posting never blocks, every directed edge is a pair of
queues, and a message moves when both queues have a head and both heads are about the same tensor.
"""

from __future__ import annotations

from collections import Counter, deque

from megatron_pipemem.schedule.schedule import Program

Tensor = tuple[str, int, int]  # activations "F" or gradients "I", producing stage, microbatch


def check(program: Program) -> list[str]:
    """Every reason why ``program`` does not carry out its schedule; empty when it does."""
    return _other_compute(program) or misreduced(program) or undelivered(program)


def _other_compute(program: Program) -> list[str]:
    problems = []
    for device, actions in enumerate(program.actions):
        computed = tuple(
            a
            for a in actions
            if not a.kind.value.startswith(("SEND", "RECV")) and a.kind.value not in ("REDUCE_REPLICAS", "REDUCE_GRAD")
        )
        if computed != program.schedule.orders[device]:
            problems.append(f"device {device} computes something else than its order")
    return problems


def misreduced(program: Program) -> list[str]:
    problems = []
    reduced: Counter[int] = Counter()
    trained = set()
    replicas = program.placement.replicas
    size = len(program.placement.devices) // replicas
    for device, actions in enumerate(program.actions):
        names = [(a.kind.value, a.stage) for a in actions]
        for letter, stage in names:
            if letter in "WB":
                trained |= set(range(stage % size, replicas * size, size))
        for position, action in enumerate(actions):
            if action.kind.value == "REDUCE_GRAD":
                reduced[action.stage] += 1
                later = ("W", "B", "T", "EMBED_B", "REDUCE_REPLICAS")
                early = any((letter, action.stage) in names[position:] for letter in later)
                local = action.stage in program.placement.stages[device]
                if early or not local or action.microbatch is not None:
                    problems.append(f"{action} is misplaced on device {device}")
    return (
        problems
        + [f"stage {s} is reduced {reduced[s]} times" for s in trained | set(reduced) if reduced[s] != (s in trained)]
        + _misadded(program, trained, size)
    )


def _misadded(program: Program, trained: set[int], size: int) -> list[str]:
    """Copies of a stage are added up once, complete, with all devices that hold some in one order."""
    devices, problems = program.placement.devices, []
    added: dict[int, int] = {}
    meetings: dict[frozenset[int], dict[int, list[int]]] = {}
    for device, actions in enumerate(program.actions):
        names = [(a.kind.value, a.stage) for a in actions]
        for position, (kind, stage) in enumerate(names):
            if kind != "REDUCE_REPLICAS":
                continue
            added[stage] = added.get(stage, 0) + 1
            early = ("W", stage) in names[position:] or ("B", stage) in names[position:]
            local = stage in program.placement.stages[device]
            if early or not local or actions[position].microbatch is not None:
                problems.append(f"{actions[position]} is misplaced on device {device}")
            others = frozenset(d for s, d in enumerate(devices) if s % size == stage % size)
            here = meetings.setdefault(others, {}).setdefault(device, [])
            if stage % size in here:  # several copies on one device meet the others with the last of them
                here.remove(stage % size)
            here.append(stage % size)
    wanted = dict.fromkeys(trained, 1) if program.placement.replicas > 1 else {}
    if added != wanted:
        problems.append(f"sums of copies {added}, not {wanted}")
    return problems + [
        f"devices {set(d)} sum in different orders" for d, o in meetings.items() if len({*map(tuple, o.values())}) > 1
    ]


def undelivered(program: Program, have: list[set[Tensor]] | None = None) -> list[str]:
    """Return the faults: actions that cannot run, and messages left over.

    ``have`` has the results on every device before the program. Those of the program are added.
    """
    devices = program.placement.devices
    size = len(devices) // program.placement.replicas

    def are_neighbours(stage: int, other: int) -> bool:
        """Whether both exist, in one copy of the model; they are one apart."""
        return 0 <= stage < len(devices) and 0 <= other < len(devices) and stage // size == other // size

    have = [set() for _ in program.actions] if have is None else have
    position = [0] * len(program.actions)
    added: set[int] = set()
    sent: dict[tuple[int, int], deque[Tensor]] = {}
    wanted: dict[tuple[int, int], deque[Tensor]] = {}
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(program.actions):
            while position[device] < len(actions):
                letter, stage, microbatch = actions[position[device]]
                down = letter in ("SEND_F", "RECV_F", "F")
                if letter.value.startswith("SEND"):
                    tensor = (letter.value[-1], stage, microbatch)
                    other = stage + 1 if down else stage - 1
                    if tensor not in have[device] or not are_neighbours(stage, other):
                        return [f"device {device} sends {tensor}, which it has not"]
                    sent.setdefault((device, devices[other]), deque()).append(tensor)
                elif letter.value.startswith("RECV"):
                    source = stage - 1 if down else stage + 1
                    if not are_neighbours(stage, source):
                        return [f"device {device} receives {letter} of stage {source}, which does not exist"]
                    tensor = (letter.value[-1], source, microbatch)
                    wanted.setdefault((devices[source], device), deque()).append(tensor)
                elif letter == "REDUCE_REPLICAS":
                    added.add(stage)
                elif letter == "REDUCE_GRAD" and program.placement.replicas > 1:
                    if not added.issuperset(range(stage % size, len(devices), size)):
                        break
                elif letter in ("F", "I", "B"):
                    source = stage - 1 if down else stage + 1
                    tensor = ("F" if down else "I", source, microbatch)
                    if are_neighbours(stage, source) and tensor not in have[device]:
                        break
                    have[device].add(("F" if down else "I", stage, microbatch))
                position[device] += 1
                moved = True
        for edge in sent.keys() & wanted.keys():
            while sent[edge] and wanted[edge]:
                tensor, expected = sent[edge].popleft(), wanted[edge].popleft()
                if tensor != expected:
                    return [f"on edge {edge} {tensor} arrives where {expected} is expected"]
                if edge[0] == edge[1] or tensor in have[edge[1]]:
                    return [f"{tensor} is sent to device {edge[1]}, which has it"]
                have[edge[1]].add(tensor)
                moved = True
    stuck = [
        f"device {d} stops at {actions[position[d]]}"
        for d, actions in enumerate(program.actions)
        if position[d] < len(actions)
    ]
    left = [f"on edge {edge} {list(queue)} is left" for side in (sent, wanted) for edge, queue in side.items() if queue]
    return stuck + left
