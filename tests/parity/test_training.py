"""Training through the engine equals training one process on the same global batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import TinyGPT, modes_for
from tests.support.parity import STEPS, reference, train
from tests.support.ranks import run_ranks

CASES = [
    (policy, accumulation)
    for policy in ("dp", "zdp2", "zdp", "mixed", "joined zdp2", "joined zdp")
    for accumulation in (1, 2)
]


def train_all(rank: int, ranks: int) -> Any:
    """Every case in the same processes, since starting them takes longer than training."""
    return [train(rank, ranks, *case, STEPS) for case in CASES]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def runs(request: pytest.FixtureRequest) -> dict[tuple[str, int], list[Any]]:
    """What each rank returned, by case."""
    by_rank = run_ranks(train_all, request.param)
    return {case: [results[i] for results in by_rank] for i, case in enumerate(CASES)}


@pytest.mark.parametrize(("policy", "accumulation"), CASES)
def test_engine_matches_plain_losses_and_weights(
    runs: dict[tuple[str, int], list[Any]], policy: str, accumulation: int
) -> None:
    results = runs[policy, accumulation]
    expected_losses, expected = reference(STEPS)
    losses = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected_losses), rtol=1e-5, atol=0)
    state = results[0][1]
    assert list(state) == list(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert all(result[1] == {} and result[2] == {} for result in results[1:])


def test_collectives_per_step_counts_collectives_of_each_mode(runs: dict[tuple[str, int], list[Any]]) -> None:
    sharded = len(modes_for(TinyGPT(), "zdp"))
    counted = {policy: runs[policy, 1][0][3] for policy in ("dp", "zdp2", "zdp", "joined zdp2", "joined zdp")}
    together = 2 + len(("embed", "head"))  # units: two blocks of four operators each, and two operators
    assert counted == {
        "dp": 1,
        "zdp2": 2 * sharded + 1,
        "zdp": 3 * sharded + 1,
        "joined zdp2": 2 * together + 1,
        "joined zdp": 3 * together + 1,
    }
