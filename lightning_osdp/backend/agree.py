"""Agreement of ranks on numbers, objects and errors. Collective: every rank must call these functions."""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.errors import OSDPError, RecoverableError, format_error, message_of

Result = TypeVar("Result")

LOST_CONNECTION_PATTERNS = ("peer", "onnection", "gloo", "NCCL", "Broken pipe", "imed out", "Socket")
"""Parts of messages of backends that only say that another rank is not there."""

FAILURE_WAIT_S = 4.0
"""Seconds that a rank whose work failed waits for the others. Then it fails: they may wait for it in that work."""

POLL_S = 0.02
"""Seconds between two looks at the store."""

_agreement_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Numbers the agreements of each group; every rank counts the same ones."""


def all_reduce_max(numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the maximum over the ranks of each number. Integers are exact up to 2^53."""
    maxima = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    return [float(maximum) for maximum in maxima.tolist()]


def all_reduce_min(value: int | None, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the minimum over the ranks; None stands for infinity."""
    (negated_minimum,) = all_reduce_max([-math.inf if value is None else -value], group, device)
    return -negated_minimum


def broadcast_object(group: Any, value: Result, source: int = 0) -> Result:
    """Return on every rank the value of rank ``source``, the first one unless told otherwise; it is pickled."""
    values = [value if group.rank() == source else None]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, source), group=group)
    return values[0]  # type: ignore[return-value]


def raise_on_all_ranks(group: Any, work: Callable[[], Result]) -> Result:
    """Run ``work`` on every rank, and raise on every rank if it fails on any, so that no rank is left waiting.

    Errors are published in the group's store, for ``work`` may be collective: where it fails on one rank, others may
    wait for that rank within it. Then that rank raises its error after ``FAILURE_WAIT_S``, whatever its kind, which
    closes its connections; and the others, which lose them, find the error in the store.

    Raises:
        Exception: this rank's own error; without one, an ``OSDPError`` that names the rank that failed and its error
            (or that error itself, if it is a subclass of ``OSDPError``).
    """
    if is_emulated(group):
        return work()
    own_error: Exception | None = None
    result: Result | None = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it; it is raised below
        own_error = error
    shared_error = own_error
    if own_error is not None and not _can_be_shared(own_error):
        shared_error = OSDPError(format_error(own_error))
    store: Any = _get_process_group_store(group)
    name = f"agreement/{next(_agreement_numbers[group.group_name])}"
    try:
        if shared_error is not None:
            store.set(f"{name}/error/{group.rank()}", pickle.dumps((shared_error, is_lost_connection(own_error))))
        if not meet(store, name, group.size(), FAILURE_WAIT_S if own_error is not None else None):
            raise _separating_error(store, name, group, own_error)
    except dist.DistError:  # the store has ended with the first rank
        if own_error is None:
            raise
        raise own_error from None
    errors: list[OSDPError | None] = [None] * group.size()
    dist.all_gather_object(errors, shared_error, group=group)
    if own_error is not None:
        raise own_error
    for rank, other_error in enumerate(errors):
        if other_error is not None:
            raise _error_of_rank(rank, other_error)
    return result  # type: ignore[return-value]


class _LostRankError(OSDPError):
    """Another rank has failed, maybe because it has lost a third one."""


def _can_be_shared(error: Exception) -> bool:
    """Return whether other ranks can raise an error as it is: it is ours, and can be sent."""
    if not isinstance(error, OSDPError):
        return False
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # it may hold anything
        return False
    return True


def meet(store: Any, name: str, ranks: int, timeout_s: float | None) -> bool:
    """Return whether all ranks come here before any of them gives up.

    The answer is the same on all ranks, except that one that does not wait may be told yes and others no.

    Args:
        store: a store that the ranks share.
        name: names this meeting.
        ranks: the number of ranks.
        timeout_s: how long this rank waits; None: not at all, it goes on to something in which it can be told.
    """
    is_last = store.add(f"{name}/arrived", 1) == ranks
    if timeout_s is None and not is_last:
        return not (store.check([f"{name}/outcome"]) and store.get(f"{name}/outcome") == b"parted")
    deadline = time.monotonic() + (timeout_s or 0.0)
    while not is_last and not store.check([f"{name}/outcome"]):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    if not store.check([f"{name}/outcome"]) and store.add(f"{name}/deciding", 1) == 1:
        store.set(f"{name}/outcome", "met" if is_last else "parted")
    return bool(store.get(f"{name}/outcome") == b"met")  # waits for the rank that decides


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an error only says that another rank is not there."""
    if isinstance(error, dist.DistError | _LostRankError):
        return True
    return isinstance(error, RuntimeError) and any(pattern in message_of(error) for pattern in LOST_CONNECTION_PATTERNS)


def _separating_error(store: Any, name: str, group: Any, own_error: Exception | None) -> Exception:
    """Return the error to raise where ranks did not meet, and so can't go on together."""
    if own_error is None or is_lost_connection(own_error):
        keys = {rank: f"{name}/error/{rank}" for rank in range(group.size()) if rank != group.rank()}
        others = {rank: pickle.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        for rank, (error, is_lost) in others.items():
            if not is_lost:
                return _error_of_rank(rank, error, can_go_on=False)
        if own_error is None:  # an error of the user may look like a lost connection, too
            texts = [f"rank {rank} failed: {error}" for rank, (error, _) in others.items()]
            return _LostRankError("; ".join(texts) or "another rank has failed")
    if isinstance(own_error, RecoverableError) and isinstance(own_error.__cause__, Exception):
        return own_error.__cause__
    return own_error


def _error_of_rank(rank: int, error: OSDPError, can_go_on: bool = True) -> OSDPError:
    """Return the error to raise on other ranks."""
    if type(error) is OSDPError:
        return OSDPError(f"rank {rank} failed: {error}")
    return error if can_go_on or not isinstance(error, RecoverableError) else OSDPError(str(error))
