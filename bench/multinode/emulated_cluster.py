"""Runs a command as the ranks of an emulated cluster on this machine, each under a hard memory limit.

    python -m bench emulated-cluster --nodes 2 --per-node 1 --rate 1gbit --memory 900M -- python train.py

A node is a network namespace. Ranks of one node talk over its loopback at full speed; what goes to another node leaves
through a virtual cable at --rate. With one node there is no cable. Each rank is in a memory cgroup of its own: over
--memory the kernel kills it, as a real out-of-memory would. Ranks see the environment that torchrun gives, so PyTorch
Lightning takes them as started by it (`devices` = ranks per node, `num_nodes` = nodes).

The last line printed holds each rank's exit status (-9: killed by the kernel or at the end of the time), whether the
kernel killed it for its memory, and its peak memory; with --json as one JSON object. Exits with 0 if all ranks did.

Needs root, iproute2 and cgroup v1 with the memory controller (a cgroup v2 host: boot with
systemd.unified_cgroup_hierarchy=0).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/memory")
SUBNET = "10.78.0"
MASTER_PORT = 29512
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
GRACE_S = 3.0
"""How long the other ranks may go on after one failed."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    status: int
    """Exit status; negative: the signal that ended it."""
    out_of_memory: bool
    """Whether the kernel killed it at its limit."""
    peak_bytes: int
    """Largest memory charged to the rank and its children, page cache included."""


@dataclass(frozen=True)
class Cluster:
    """The emulated hardware; ``key`` sets it apart from others on this machine."""

    name: str
    nodes: int
    per_node: int
    rate: str | None
    memory_bytes: int | None

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.per_node

    def host(self, node: int) -> str:
        """Name of the node's network namespace."""
        return f"{self.name}n{node}"

    def cgroup(self, rank: int) -> Path:
        """The rank's memory cgroup."""
        return CGROUPS / f"{self.name}r{rank}"


def parse_bytes(text: str) -> int:
    """``900M``, ``1.5G``, ``4096``: bytes."""
    unit = UNITS.get(text[-1:].upper())
    return int(float(text[:-1]) * unit) if unit else int(text)


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def network(cluster: Cluster) -> Iterator[None]:
    """One namespace for each node, cabled to a common bridge if there are several."""
    bridge = f"{cluster.name}br"
    with ExitStack() as cleanup:
        ended = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does: nothing is left behind
        cleanup.callback(signal.signal, signal.SIGTERM, ended)
        if cluster.nodes > 1:
            sh(f"ip link add {bridge} type bridge")
            cleanup.callback(sh, f"ip link del {bridge}")
            sh(f"ip link set {bridge} up")
        for node in range(cluster.nodes):
            host = cluster.host(node)
            sh(f"ip netns add {host}")
            cleanup.callback(sh, f"ip netns del {host}")
            sh(f"ip -n {host} link set lo up")
            if cluster.nodes > 1:
                plug = connect(cluster, node, bridge)
                # Both ends at once; those that go with their namespace take a moment, and the name stays taken.
                cleanup.callback(sh, f"ip link del {plug}")
        yield


def connect(cluster: Cluster, node: int, bridge: str) -> str:
    """Lays the cable from a node to the bridge and limits what the node may send over it. Returns the bridge's end."""
    host, plug = cluster.host(node), f"{cluster.name}p{node}"
    sh(f"ip link add {plug} type veth peer name eth0 netns {host}")
    sh(f"ip link set {plug} master {bridge} up")
    sh(f"ip -n {host} addr add {SUBNET}.{node + 1}/24 dev eth0")
    sh(f"ip -n {host} link set eth0 up")
    if cluster.rate:
        # The burst covers what 1 ms lets through at 4 Gbit/s; a smaller one would throttle below the rate.
        sh(f"ip netns exec {host} tc qdisc add dev eth0 root tbf rate {cluster.rate} burst 512kb latency 200ms")
    return plug


@contextmanager
def memory_cgroups(cluster: Cluster) -> Iterator[None]:
    """One cgroup for each rank, with its limit. Removed when empty, so the ranks must have ended."""
    with ExitStack() as cleanup:
        for rank in range(cluster.ranks):
            cgroup = cluster.cgroup(rank)
            cgroup.mkdir()
            cleanup.callback(remove_cgroup, cgroup)
            if cluster.memory_bytes is not None:
                (cgroup / "memory.limit_in_bytes").write_text(str(cluster.memory_bytes))
        yield


def raise_limit(more_bytes: int) -> None:
    """Lets this process's cgroup have more than its limit was, if it is in one that has a limit of its own."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next(path for _, controllers, path in lines if "memory" in controllers.split(","))
    file = CGROUPS / path.lstrip("/") / "memory.limit_in_bytes"
    if path != "/":
        file.write_text(str(int(file.read_text()) + more_bytes))


def remove_cgroup(cgroup: Path) -> None:
    """Ends what a rank left running and waits until the kernel has let go of it."""
    for _ in range(50):
        pids = [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()]
        if not pids:
            break
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    cgroup.rmdir()


def environment(cluster: Cluster, rank: int) -> dict[str, str]:
    """What torchrun sets for a rank."""
    node, local_rank = divmod(rank, cluster.per_node)
    several = cluster.nodes > 1
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "ROLE_RANK": rank,
        "WORLD_SIZE": cluster.ranks,
        "LOCAL_WORLD_SIZE": cluster.per_node,
        "GROUP_WORLD_SIZE": cluster.nodes,
        "ROLE_WORLD_SIZE": cluster.ranks,
        "MASTER_ADDR": f"{SUBNET}.1" if several else "127.0.0.1",
        "MASTER_PORT": MASTER_PORT,
        "TORCHELASTIC_RUN_ID": cluster.name,
        "GLOO_SOCKET_IFNAME": "eth0" if several else "lo",
        "NCCL_SOCKET_IFNAME": "eth0" if several else "lo",
    }
    return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | {name: str(value) for name, value in values.items()}


def start(cluster: Cluster, rank: int, command: list[str]) -> subprocess.Popen[bytes]:
    """Starts a rank in its node's network and its own cgroup."""
    # The shell enters the cgroup before anything of the rank is loaded: memory is charged to whoever touches it first.
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    host = cluster.host(rank // cluster.per_node)
    inside = ["ip", "netns", "exec", host, *command]
    return subprocess.Popen(
        ["sh", "-c", enter, str(cluster.cgroup(rank)), *inside], env=environment(cluster, rank), start_new_session=True
    )


def wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Returns once all ranks ended, the time is over, or ``FAILURE_GRACE_S`` after the first failure."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while time.monotonic() < deadline:
        statuses = [rank.poll() for rank in ranks]
        if None not in statuses:
            return
        if not failed and any(statuses):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends each rank that still runs, with its own children."""
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def outcome(cluster: Cluster, rank: int, status: int) -> Outcome:
    """Reads what the kernel counted for a rank that ended."""
    cgroup = cluster.cgroup(rank)
    control = dict(line.split() for line in (cgroup / "memory.oom_control").read_text().splitlines())
    # Older kernels have no count of kills; there a kill at the limit is the one sign.
    killed = int(control["oom_kill"]) > 0 if "oom_kill" in control else status == -signal.SIGKILL
    return Outcome(status, killed, int((cgroup / "memory.max_usage_in_bytes").read_text()))


def run(cluster: Cluster, command: list[str], timeout_s: float) -> list[Outcome]:
    """Runs ``command`` on every rank of ``cluster`` and leaves nothing behind."""
    with network(cluster), memory_cgroups(cluster):
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(cluster.ranks):
                ranks.append(start(cluster, rank, command))
            wait(ranks, timeout_s)
        finally:
            end(ranks)
        return [outcome(cluster, rank, process.returncode) for rank, process in enumerate(ranks)]


def report(outcomes: list[Outcome], as_json: bool) -> str:
    """The last line."""
    if as_json:
        return json.dumps({"ranks": [asdict(one) for one in outcomes]})
    words = []
    for rank, one in enumerate(outcomes):
        killed = " OUT OF MEMORY" if one.out_of_memory else ""
        words.append(f"rank {rank} status {one.status}{killed} peak {one.peak_bytes >> 20} MiB")
    return "lab: " + ", ".join(words)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--per-node", type=int, default=2, help="ranks of each node")
    parser.add_argument("--rate", help="of each node's link, as tc takes it: 1gbit (default: unlimited)")
    parser.add_argument("--memory", type=parse_bytes, help="hard limit of each rank: 900M, 1.5G (default: none)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--json", action="store_true", help="print the last line as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what each rank runs")
    args = parser.parse_args(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command to run: give one after --")
    if not CGROUPS.joinpath("memory.limit_in_bytes").exists() or os.geteuid() != 0:
        parser.error(f"needs root and the memory controller of cgroup v1 at {CGROUPS}")
    cluster = Cluster(f"osdp{os.getpid()}", args.nodes, args.per_node, args.rate, args.memory)
    outcomes = run(cluster, command, args.timeout)
    print(report(outcomes, args.json), flush=True)
    return 0 if all(one.status == 0 for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
