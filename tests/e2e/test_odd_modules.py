"""Odd hooks, steps and optimizers give DDP's weights and values, or are refused with the reason, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.odd_changes import CHANGE_CASES
from tests.support.odd_features import (
    FEATURE_CASES,
    FeaturesChosenByRank,
    PartsRecomputedByRank,
    RowsChosenByRank,
    UsedByRank,
)
from tests.support.odd_modules import CASES, fit, judge_all
from tests.support.ranks import RankError, run_ranks

ALL_CASES = CASES | FEATURE_CASES | CHANGE_CASES


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[Any, str], str]]:
    return run_ranks(judge_all, 2, str(tmp_path_factory.mktemp("odd")), ALL_CASES)


@pytest.mark.parametrize(("kind", "policy"), ALL_CASES)
def test_odd_module_has_the_values_of_ddp_or_is_refused_with_the_reason(
    kind: Any, policy: str, found: list[dict[tuple[Any, str], str]]
) -> None:
    expected = ALL_CASES[kind, policy]
    for by_rank in found:
        text = by_rank[kind, policy]
        assert text == "equal" if expected == "equal" else text.startswith("ShardingError") and expected in text, text


USED_ON_ALL = "is tensor parallel, so that ranks compute for each other: what a run of it gives must be used on all"
ALONE = {
    PartsRecomputedByRank: "down is tensor parallel, and ranks recompute it in different order",
    RowsChosenByRank: f"table {USED_ON_ALL}",
    FeaturesChosenByRank: f"down {USED_ON_ALL}",
    UsedByRank: f"down {USED_ON_ALL}",
}
"""Modules that end with one rank within a collective, with the error of the other one."""


def fit_alone(rank: int, count: int, folder: str, kind: Any) -> None:
    fit(kind, "tp", folder)


@pytest.mark.parametrize("kind", ALONE)
def test_ranks_that_differ_in_backward_passes_of_what_they_run_together_are_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 20.0)  # the other one is ended five seconds after it was told
    with pytest.raises(RankError, match=ALONE[kind]) as raised:
        run_ranks(fit_alone, 2, str(tmp_path), kind, timeout_s=60)
    assert "were not done" not in str(raised.value)
