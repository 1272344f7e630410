"""Measure the links between this machine's devices, with processes that are gone when the function returns."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from lightning_osdp.autotune.ranks import RankGroup, current_cluster
from lightning_osdp.backend.timer import CORE_SHARING
from lightning_osdp.errors import ConfigurationError, OSDPError
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.profiling import network

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

RESULT = "cluster.json"
"""Name of the file that the first rank writes."""


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
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="osdp-") as folder:
        arguments = (devices, device_type, folder, timeout_s)
        context = spawn(_run_rank, arguments, devices, join=False)  # type: ignore[no-untyped-call]
        try:
            while not context.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise OSDPError(f"measuring the links was not done after {timeout_s:g} s")
        except ProcessRaisedException as error:
            cause = str(error).strip().splitlines()[-1]
            raise OSDPError(f"rank {error.error_index} failed to measure the links: {cause}") from error
        except ProcessExitedException as error:
            cause = "the process ended without a result"
            raise OSDPError(f"rank {error.error_index} failed to measure the links: {cause}") from error
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return Cluster.from_json(Path(folder, RESULT).read_text(encoding="utf-8"))


def _run_rank(rank: int, ranks: int, device_type: str, folder: str, timeout_s: float) -> None:
    """Measure on one rank; the first one writes the cluster to a file."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _set_num_threads_if_needed(ranks)
    if device_type == "cpu":
        CORE_SHARING.set_process_count(ranks)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    store, timeout = f"file://{Path(folder, 'store')}", timedelta(seconds=timeout_s)  # no port, which others could take
    dist.init_process_group(BACKENDS[device_type], store, rank=rank, world_size=ranks, timeout=timeout)
    group = RankGroup(dist.group.WORLD, 1, device)
    cluster = current_cluster(group, network.measure_links(group.group, device))
    if group.is_rank_zero:
        Path(folder, RESULT).write_text(cluster.model_dump_json(), encoding="utf-8")
    dist.barrier(group=group.group)
    dist.destroy_process_group()
