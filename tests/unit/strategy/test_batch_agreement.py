"""Which of the ranks' batches decide memory and time."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy
from lightning_osdp.strategy import plan_resolution
from lightning_osdp.strategy.batch_agreement import agree_on_batches
from lightning_osdp.strategy.dataloader import batch_bytes


@dataclass
class Ranks:
    """All ranks in one process, each with its own batches; this one is ``rank``."""

    contexts: list[TrialContext]
    rank: int
    sent: list[int] = field(default_factory=list)

    is_rank_zero = False

    def all_gather_object(self, _: Any) -> list[Any]:
        largest = [one.batch if one.largest_batch is None else one.largest_batch for one in self.contexts]
        sizes = zip(largest, self.contexts, strict=True)
        return [(batch_bytes(big), batch_bytes(one.batch), one.batch_size) for big, one in sizes]

    def broadcast_object(self, value: Any, source: int) -> Any:
        one = self.contexts[source]
        largest = one.batch if one.largest_batch is None else one.largest_batch
        batch = one.batch if self.sent else largest  # the largest comes first
        self.sent.append(source)
        return pickle.dumps(batch), ""

    def raise_on_all_ranks(self, work: Any) -> Any:
        return work()


def context(typical: int, largest: int, rows: int = 2) -> TrialContext:
    module: Any = SimpleNamespace()
    big = torch.zeros(rows, largest) if largest != typical else None
    return TrialContext(module, torch.zeros(rows, typical), rows, torch.device("cpu"), largest_batch=big)


def shape(batch: Tensor | None) -> tuple[int, ...] | None:
    return None if batch is None else tuple(batch.shape)


@pytest.mark.parametrize(
    ("lengths", "largest_on", "typical_on"),
    [
        (((8, 9), (8, 30), (8, 9)), 1, 1),  # all typical ones are alike: any will do
        (((5, 9), (7, 30), (6, 9)), 1, 2),
        (((50, 50), (7, 30), (6, 9)), 0, 1),
    ],
)
def test_largest_of_all_decides_memory_and_median_time(
    lengths: tuple[tuple[int, int], ...], largest_on: int, typical_on: int
) -> None:
    contexts = [context(*pair) for pair in lengths]
    for rank in range(3):
        ranks, data = Ranks(contexts, rank), SimpleNamespace(bytes_per_sample=0.0)
        agreed = agree_on_batches(ranks, data, contexts[rank])  # type: ignore[arg-type]
        assert ranks.sent == [largest_on, typical_on]
        assert data.bytes_per_sample == 4 * lengths[largest_on][1]
        assert shape(agreed.largest_batch) == (2, lengths[largest_on][1])
        assert shape(agreed.batch) == (2, lengths[typical_on][0])


def test_equal_batches_are_not_sent() -> None:
    contexts = [context(5, 9)] * 3
    ranks = Ranks(contexts, 2)
    assert agree_on_batches(ranks, SimpleNamespace(), contexts[2]) is contexts[2]  # type: ignore[arg-type]
    assert ranks.sent == []


def test_batches_of_other_numbers_of_samples_are_planned_by_the_largest_alone() -> None:
    contexts = [context(10, 10, rows=2), context(40, 40, rows=3)]
    ranks, data = Ranks(contexts, 1), SimpleNamespace(bytes_per_sample=0.0)
    agreed = agree_on_batches(ranks, data, contexts[1])  # type: ignore[arg-type]
    assert ranks.sent == [1]
    assert (agreed.batch_size, shape(agreed.batch), agreed.largest_batch) == (3, (3, 40), None)


@pytest.mark.parametrize("rank", [0, 1])
def test_search_is_bounded_by_the_data_that_allow_least_and_says_by_which_argument(rank: int) -> None:
    policies = [
        BatchSizePolicy(max_batch_size=size, bounding_setting=name) for size, name in ((40, "one"), (12, "two"))
    ]
    ranks: Any = SimpleNamespace(all_gather_object=lambda _: policies)
    assert plan_resolution._agree_on_batch_sizes(policies[rank], ranks) == policies[1]
