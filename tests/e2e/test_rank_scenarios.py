"""Ranks that do different things in a Trainer's run: DDP's weights, or an error on all ranks that says who did what."""

from __future__ import annotations

import warnings

import pytest

from lightning_osdp.backend import blocked_thread
from tests.support import rank_scenarios as scenarios
from tests.support.rank_scenarios import Net, fit
from tests.support.ranks import RankError, run_ranks

LIKE_DDP: list[tuple[type[Net], str]] = [
    (scenarios.OtherOrder, "sliced"),
    (scenarios.OtherOrder, "per block"),
    (scenarios.AuxiliaryLoss, "zdp"),
    (scenarios.AuxiliaryLoss, "zdp2"),
    (scenarios.AuxiliaryLoss, "sliced"),
    (scenarios.FrozenByRank, "mixed"),
    (scenarios.FrozenByRank, "recomputed"),
    (scenarios.LayerDropoutInCheckpoint, "zdp"),
    (scenarios.LayerDropoutInCheckpoint, "per block"),
    (scenarios.LayerDropoutInCheckpoint, "recomputed"),
    (scenarios.UnequalBatches, "sliced"),
    (scenarios.UnequalBatches, "recomputed"),
    (scenarios.RunsAlone, "zdp"),
    (scenarios.RunsAlone, "mixed"),
    (scenarios.Sampler, "zdp"),
    (scenarios.ReadsAlone, "zdp"),
]


def name_of(case: object) -> str:
    return case.__name__ if isinstance(case, type) else str(case)


def compare(rank: int, ranks: int) -> list[float]:
    """How far the weights of each case are from DDP's."""
    warnings.simplefilter("ignore")
    right = {kind: fit(kind, "ddp") for kind, _ in LIKE_DDP}
    differences = []
    for kind, policy in LIKE_DDP:
        found = fit(kind, policy)
        differences.append(max(float((value - right[kind][name]).abs().max()) for name, value in found.items()))
    return differences


@pytest.fixture(scope="module")
def differences() -> list[float]:
    return [max(each) for each in zip(*run_ranks(compare, 2), strict=True)]


@pytest.mark.parametrize("index", range(len(LIKE_DDP)), ids=[" ".join(map(name_of, case)) for case in LIKE_DDP])
def test_ranks_that_do_different_things_train_as_under_ddp(differences: list[float], index: int) -> None:
    assert differences[index] < 1e-6


def fit_quickly(rank: int, ranks: int, kind: str) -> None:
    blocked_thread.MUTUAL_WAIT_S, blocked_thread.CONFIRMATION_S = 3.0, 1.0
    fit(getattr(scenarios, kind), "zdp")


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (
            "OwnCollective",
            (
                "rank 1 was ended, since ranks wait for each other: rank 0 waits where it ran first; rank 1 waits in "
                "all_reduce (tests.support.rank_scenarios, line ",
            ),
        ),
        ("Manual", ("ranks wait for each other: rank 1 runs first, after", "while rank 0 waits in broadcast")),
        ("StopsAlone", ("rank 1 takes part in the end of training", "while rank 0 waits in broadcast")),
        ("NoLoss", ("Skipping the `training_step` by returning None in distributed training is not supported",)),
        ("OneFails", ("can't allocate memory",)),
    ],
)
def test_fault_of_one_rank_in_training_ends_all_with_its_cause(kind: str, texts: tuple[str, ...]) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(fit_quickly, 2, kind, timeout_s=60)
    for text in texts:
        assert text in str(raised.value)
    assert "were not done" not in str(raised.value)
