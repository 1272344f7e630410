"""Agreement of ranks on numbers, objects and errors. Collective: every rank must call these functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_osdp.errors import OSDPError

Result = TypeVar("Result")


def all_reduce_max(numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the maximum over the ranks of each number. Integers are exact up to 2^53."""
    maxima = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    return [float(maximum) for maximum in maxima.tolist()]


def all_reduce_min(value: int | None, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the minimum over the ranks; None stands for infinity."""
    (negated_minimum,) = all_reduce_max([-math.inf if value is None else -value], group, device)
    return -negated_minimum


def broadcast_object(group: Any, value: Result) -> Result:
    """Return the first rank's value on every rank; it is pickled."""
    values = [value if group.rank() == 0 else None]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]  # type: ignore[return-value]


def raise_on_all_ranks(group: Any, work: Callable[[], Result]) -> Result:
    """Run ``work`` on every rank, and raise on every rank if it fails on any, so that no rank is left waiting.

    Raises:
        Exception: this rank's own error; without one, an ``OSDPError`` that names the rank that failed and its error
            (or that error itself, if it is a subclass of ``OSDPError``).
    """
    own_error: Exception | None = None
    result: Result | None = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it; it is raised below
        own_error = error
    shared_error = own_error
    if own_error is not None and not isinstance(own_error, OSDPError):
        shared_error = OSDPError(f"{type(own_error).__name__}: {own_error}")
    errors: list[OSDPError | None] = [None] * group.size()
    dist.all_gather_object(errors, shared_error, group=group)
    if own_error is not None:
        raise own_error
    for rank, other_error in enumerate(errors):
        if other_error is not None:
            raise other_error if type(other_error) is not OSDPError else OSDPError(f"rank {rank} failed: {other_error}")
    return result  # type: ignore[return-value]
