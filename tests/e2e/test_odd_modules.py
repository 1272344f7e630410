"""Odd hooks, steps and optimizers give DDP's weights and values, or are refused with the reason, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.odd_changes import CHANGE_CASES
from tests.support.odd_features import FEATURE_CASES, PartsRecomputedByRank
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


def fit_alone(rank: int, count: int, folder: str) -> None:
    fit(PartsRecomputedByRank, "tp", folder)


def test_parts_that_ranks_recompute_in_different_order_are_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 20.0)  # the other one is ended five seconds after it was told
    with pytest.raises(RankError, match="down is tensor parallel, and ranks recompute it in different order") as raised:
        run_ranks(fit_alone, 2, str(tmp_path), timeout_s=60)
    assert "were not done" not in str(raised.value)
