"""Collectives on rows of activations, of which each rank of a group may have another number.

Rows are gathered, or summed and scattered, or exchanged for columns of other rows. Where all ranks have the same number
nothing is copied; otherwise shorter ones are padded on the way. Every rank knows the counts, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.backend import collectives
from lightning_osdp.backend.work import COMM_WAIT


def exchange_numbers(numbers: Sequence[int], group: Any) -> list[list[int]]:
    """Return the numbers of each rank on the host. Collective.

    Args:
        numbers: as many on each rank.
        group: ranks with a backend for CPU tensors.
    """
    own = torch.tensor(numbers, dtype=torch.int64)
    everyone = own.new_empty(group.size() * len(numbers))
    collectives.all_gather(everyone, own, group)
    return everyone.view(group.size(), -1).tolist()


def start_exchange(numbers: Sequence[int], group: Any) -> Callable[[], list[list[int]]]:
    """Start ``exchange_numbers``; returns what waits for the numbers."""
    own = torch.tensor(numbers, dtype=torch.int64)
    everyone = own.new_empty(group.size() * len(numbers))
    work = collectives.all_gather_async([everyone], [own], group)

    def finish() -> list[list[int]]:
        work.wait()
        return everyone.view(group.size(), -1).tolist()

    return finish


def gather_rows(rows: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Return the rows of all ranks, one rank's after the other's.

    Args:
        rows: (n, ...), alike on all ranks but for n.
        counts: n of each rank.
        group: the ranks.
    """
    most = max(counts)
    if not most:
        return rows
    if rows.dtype == torch.bool:  # which gloo does not send
        return gather_rows(rows.view(torch.uint8), counts, group).view(torch.bool)
    gathered = rows.new_empty(len(counts), most, *rows.shape[1:])
    collectives.all_gather(gathered.view(-1), _pad(rows, most).view(-1), group)
    if min(counts) == most:
        return gathered.flatten(0, 1)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def scatter_rows(rows: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Return the sum over the ranks of those rows that are this rank's.

    Args:
        rows: (n of all ranks, ...), one rank's rows after the other's.
        counts: n of each rank.
        group: the ranks.
    """
    most, own = max(counts), counts[group.rank()]
    if not most:
        return rows
    if min(counts) < most:
        rows = torch.cat([_pad(part, most) for part in torch.split(rows, list(counts))])
    scattered = rows.new_empty(most, *rows.shape[1:])
    collectives.reduce_scatter(scattered.view(-1), rows.contiguous().view(-1), group)
    return scattered[:own]


def columns_to_rows(columns: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Return all columns of this rank's rows (n, N c), where each rank has some columns of all rows.

    Args:
        columns: (n of all ranks, c), one rank's rows after the other's.
        counts: n of each rank.
        group: the N ranks.
    """
    own, ranks, width = counts[group.rank()], len(counts), columns.shape[1]
    received = columns.new_empty(ranks * own, width)
    _all_to_all(received, columns, [own] * ranks, counts, group)
    return received.view(ranks, own, width).transpose(0, 1).flatten(1)


def rows_to_columns(rows: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Return this rank's columns of all rows: the inverse of ``columns_to_rows``."""
    own, ranks = counts[group.rank()], len(counts)
    width = rows.shape[1] // ranks
    sent = rows.view(own, ranks, width).transpose(0, 1).contiguous().flatten(0, 1)
    received = rows.new_empty(sum(counts), width)
    _all_to_all(received, sent, counts, [own] * ranks, group)
    return received


def _all_to_all(
    received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int], group: Any
) -> None:
    with torch.no_grad(), COMM_WAIT.measure():
        dist.all_to_all_single(received, sent.contiguous(), list(num_received), list(num_sent), group=group)


def _pad(rows: Tensor, count: int) -> Tensor:
    """Return contiguous rows, and zeros up to ``count``."""
    if len(rows) == count:
        return rows.contiguous()
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
