"""Odd hooks, steps and optimizers give DDP's weights and values, or are refused with the reason, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.odd_features import FEATURE_CASES
from tests.support.odd_modules import CASES, judge_all
from tests.support.ranks import run_ranks

ALL_CASES = CASES | FEATURE_CASES


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
