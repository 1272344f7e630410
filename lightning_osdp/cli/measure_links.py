"""Measure the links between this machine's devices, with processes that are gone when the function returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from lightning_osdp.autotune.ranks import RankGroup, current_cluster
from lightning_osdp.backend.timer import CORE_SHARING
from lightning_osdp.errors import ConfigurationError, OSDPError, format_error
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.profiling import network

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def measure_cluster(devices: int, device_type: str, timeout_s: float = 600.0) -> Cluster:
    """Describe this machine as a cluster of one node, with one process for each device that times collectives.

    Args:
        devices: number of processes (on CUDA: of devices).
        device_type: ``cpu`` or ``cuda``.
        timeout_s: seconds for everything, starting up included.

    Returns:
        The cluster with its measured links.

    Raises:
        ConfigurationError: there are fewer devices.
        OSDPError: a process failed or took too long; the others are ended.
    """
    if device_type == "cuda" and devices > torch.cuda.device_count():
        raise ConfigurationError(f"there are {torch.cuda.device_count()} CUDA devices here, not {devices}")
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + timeout_s
    processes: list[SpawnProcess] = []
    receivers: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="osdp-") as folder:
        store = f"file://{Path(folder) / 'store'}"  # unlike a port, nobody else can take it
        try:
            for rank in range(devices):
                receiver, sender = context.Pipe(duplex=False)
                receivers.append(receiver)
                arguments = (rank, devices, device_type, store, timeout_s, sender)
                processes.append(context.Process(target=_run_rank, args=arguments))
                processes[-1].start()
                sender.close()
            return Cluster.from_json(_await_rank0_reply(receivers, deadline, timeout_s))
        finally:
            _terminate(processes, receivers)


def _await_rank0_reply(receivers: list[Connection], deadline: float, timeout_s: float) -> str:
    """Return the reply of rank 0 once every rank is done.

    Raises:
        OSDPError: a rank failed, or time ran out.
    """
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    replies: dict[int, str] = {}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise OSDPError(f"measuring the links was not done after {timeout_s:g} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                error, replies[rank] = receiver.recv()
            except EOFError:
                error = "the process ended without a result"
            if error:
                raise OSDPError(f"rank {rank} failed to measure the links: {error}")
    return replies[0]


def _terminate(processes: list[SpawnProcess], receivers: list[Connection]) -> None:
    """End all processes: one that has replied has nothing more to do."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()
    for receiver in receivers:
        receiver.close()


def _run_rank(rank: int, ranks: int, device_type: str, store: str, timeout_s: float, sender: Connection) -> None:
    """Measure on one rank and send (error, cluster as JSON), one of which is empty."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _set_num_threads_if_needed(ranks)
    if device_type == "cpu":
        CORE_SHARING.set_process_count(ranks)
    try:
        device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
        if device_type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            BACKENDS[device_type], store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
        )
        group = RankGroup(dist.group.WORLD, 1, device)
        link = network.measure_links(group.group, device)
        reply = ("", current_cluster(group, link).model_dump_json())
        dist.barrier(group=group.group)
        dist.destroy_process_group()
    except Exception as error:  # whatever it is, the parent process reports it
        reply = (format_error(error), "")
    sender.send(reply)
    sender.close()


def _exit_with_parent() -> None:
    """End this rank when its parent process is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
