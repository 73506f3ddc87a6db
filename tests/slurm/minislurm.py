"""A real Slurm cluster on the loopback interface: one slurmctld, several slurmd, everything it writes in one folder.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. The nodes are named by loopback addresses,
which resolve without an entry in /etc/hosts, and differ in their ports.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from debian import why_missing
from patience import runs

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")

PATIENCE_SECONDS = 1800  # a job that ends otherwise than it should is told at once
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
_CONF = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until its old credential has expired; below 5 Slurm takes its default, 120.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PriorityType=priority/basic
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
SlurmctldTimeout=10
SlurmdTimeout=6
KillWait=3
MinJobAge=3600
PropagateResourceLimits=NONE
NodeName={first}[{low}-{high}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{port_list}] CPUs=4 Boards=1 \
SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return the reason if there can be no Slurm on this machine, otherwise ``None``."""
    if os.geteuid():
        return "Slurm's daemons need root"
    return why_missing(("slurmctld", "slurmd", "sbatch", "munged"), PACKAGES)


class MiniSlurm:
    """The cluster. Its folder has a short name, because a socket's path has at most 107 characters."""

    def __init__(self, folder: Path, nodes: int = 4):
        self.folder = folder
        self.nodes = [f"127.0.0.{11 + index}" for index in range(nodes)]
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        self.folder.chmod(0o755)  # munged refuses a socket below a folder that others cannot enter
        for name in ("munge", "state", "run", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = _free_ports(1 + len(self.nodes))
        low, high = (node.rpartition(".")[2] for node in (self.nodes[0], self.nodes[-1]))
        conf = _CONF.format(
            folder=self.folder,
            ports=ports,
            port_list=",".join(map(str, ports[1:])),
            first="127.0.0.",
            low=low,
            high=high,
        )
        (self.folder / "slurm.conf").write_text(conf)
        munge = self.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.call("munged", "--num-threads=2", *(f"--{option}={munge / name}" for option, name in files.items()))
        self.call("slurmctld", "-f", self.environment["SLURM_CONF"])
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.idle_nodes() == set(self.nodes), "all nodes are idle")

    def start_node(self, node: str) -> None:
        self.call("slurmd", "-f", self.environment["SLURM_CONF"], "-N", node)

    def stop(self) -> None:
        """Jobs first and munged last: what is left of a job cannot end without it."""
        with contextlib.suppress(RuntimeError):
            self.call("scancel", "--user=root")
        with contextlib.suppress(TimeoutError, RuntimeError):
            self.until(lambda: not self.call("squeue", "--noheader"), "the queue is empty", 20)
        run = self.folder / "run"
        for file in (*run.glob("slurmd-*.pid"), run / "slurmctld.pid", self.folder / "munge" / "pid"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pid = int(file.read_text())
                os.kill(pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    self.until(lambda pid=pid: not runs(pid), f"process {pid} has ended", 10)

    def call(self, *words: str, cwd: Path | None = None) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(words, env=self.environment, cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def idle_nodes(self) -> set[str]:
        return set(self.call("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job: ``JobState``, ``Restarts``, ``ExitCode`` ..."""
        return dict(re.findall(r"(\w+)=(\S+)", self.call("scontrol", "show", "job", "--oneliner", job)))

    def until(self, holds: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for something that must happen."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds} s it does not hold that {what}\n{self.call('squeue')}")
            time.sleep(0.2)

    def until_log(self, job: str, log: Path, holds: Callable[[str], object]) -> None:
        """Wait for something in the log of a job that must not end before."""

        def check() -> object:
            text = log.read_text() if log.exists() else ""
            assert holds(text) or self.job(job)["JobState"] not in _OVER, f"job {job} has ended:\n{text}"
            return holds(text)

        self.until(check, f"{log} says so")

    def ended(self, job: str) -> dict[str, str]:
        """Wait for a job's end, and say what came of it."""
        self.until(lambda: self.job(job)["JobState"] in _OVER, f"job {job} has ended")
        return self.job(job)

    def processes(self, job: str, node: str | None = None) -> list[int]:
        """Processes of a job's tasks, perhaps of one node only."""
        wanted = {f"SLURM_JOB_ID={job}", *([] if node is None else [f"SLURMD_NODENAME={node}"])}
        return [pid for pid in _pids() if wanted <= set(_environ(pid))]

    def crash(self, node: str, job: str) -> None:
        """End everything of a node at once: its daemon, what that started for jobs, and the jobs' own processes."""
        log = str(self.folder / "log" / f"slurmd-{node}.log")
        for pid in {*self.processes(job, node), *(pid for pid in _pids() if log in _open_files(pid))}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for server in sockets:
            server.bind(("127.0.0.1", 0))
        return [server.getsockname()[1] for server in sockets]


def _pids() -> Sequence[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _open_files(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return set()
