"""Rows of sharded tables whose norms torch's functions limit while they look them up (``max_norm``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lightning_osdp.backend.agree import all_reduce_max
from lightning_osdp.errors import ShardingError
from lightning_osdp.state.guarded_parameter import Followed

LOOK_UPS = frozenset({"embedding", "embedding_bag", "embedding_renorm_"})
"""Functions that limit norms of rows."""


def check_limited_rows(changed: Followed, arguments: Sequence[Any]) -> None:
    """Refuse a change of rows if they are others on each rank, so that each would write its part of others. Collective.

    Args:
        changed: the full tensor, not written back yet.
        arguments: what the function was given; the first whole numbers are the indices.
    """
    indices = next(value for value in arguments if isinstance(value, Tensor) and not value.is_floating_point())
    number, guard = crc32(torch.unique(indices).cpu().numpy().tobytes()), changed.local.guard
    guard.context.check_access(guard)
    most, negated_least = all_reduce_max([number, -number], guard.context.group, changed.full.device)
    if most != -negated_least:
        changed.stamp = (-1, -1)  # to be gathered again
        raise ShardingError(
            f"{guard.name} is sharded, and max_norm changes the rows that a rank looks up, which are others on each "
            "rank: look up the same ones on all ranks, or keep it replicated by OSDPCallback(modes=...)"
        )
