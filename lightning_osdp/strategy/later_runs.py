"""A later run in the same processes: an error where another rank has ended since, and nobody would notice."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_osdp.backend.liveness import is_dead
from lightning_osdp.errors import OSDPError

POLL_S = 0.05
"""Seconds between two looks for a rank that has not come yet."""

_ADVICE = "after an earlier run in this process failed: ranks can't go on without it, start the script anew"


def store_of_run(store: Any, run: int) -> Any:
    """Return the part of the group's store that belongs to a run."""
    return PrefixStore(f"lightning_osdp/{run}", store)


def check_reachable(store: Any) -> None:
    """Raise if the store is gone with the first rank's process: a new connection would be tried until the time-out.

    Raises:
        OSDPError: an earlier run in this process has failed, and the first rank has ended.
    """
    try:
        store.check([""])
    except dist.DistError as error:
        raise OSDPError(f"the process of the first rank has ended, {_ADVICE}") from error


def wait_for_ranks(store: Any, run: int, ranks: int, timeout_s: float) -> None:
    """Wait until all ranks have begun a run, unless it is the first one in these processes.

    Args:
        store: the group's store, in which each rank has described its process.
        run: the number of the run.
        ranks: the number of ranks.
        timeout_s: how long ranks wait for each other; then the next collective fails.

    Raises:
        OSDPError: a rank's process has ended since the run before.
    """
    present, before = store_of_run(store, run), store_of_run(store, run - 1)
    keys, deadline = [f"process/{rank}" for rank in range(ranks)], time.monotonic() + timeout_s
    if not run or present.check(keys):
        return
    for rank, key in enumerate(keys):
        while not present.check([key]) and time.monotonic() < deadline:
            if before.check([key]) and is_dead(before.get(key).decode()):
                key = f"cause/{rank}"
                cause = f". Its error: {before.get(key).decode()}" if before.check([key]) else ""
                raise OSDPError(f"the process of rank {rank} has ended, {_ADVICE}{cause}")
            time.sleep(POLL_S)
