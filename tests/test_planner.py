"""What is done where the plan that was found can't be had as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.planner import _plan_for, _Room
from lightning_osdp.planning.schedule import BatchRule, Problem, least_bytes, make_plan
from tests.planning.small import MIB, blocks_of_one, cluster, compute

MODEL = blocks_of_one(3, 2)
RULE = BatchRule(batch_size=2)
ROOMY = Problem(MODEL, cluster(), compute(MODEL), 1024 * MIB, 8 * MIB)


def test_what_is_short_by_no_more_than_a_guess_is_tried() -> None:
    least = least_bytes(ROOMY, 2)
    short = replace(ROOMY, memory_limit_bytes=least - MIB)
    for guessed_bytes in (0, MIB - 1):
        with pytest.raises(InfeasibleError, match="needs at least"):
            _plan_for(short, RULE, [], guessed_bytes)
    with pytest.warns(OSDPWarning, match=r"needs at least.*What would fit.*training is tried"):
        plan = _plan_for(short, RULE, [], MIB)
    assert plan.predicted.peak_memory_bytes == least
    assert plan.memory_limit_bytes == short.memory_limit_bytes


def test_what_steps_leave_behind_is_as_an_earlier_start_has_seen_it() -> None:
    room = _Room(limit=100, used=60, guessed=12)
    assert room.as_shown(50) == _Room(100, 50, 0)
    for other in (0, 47, 61):  # nothing seen, or another process than now
        assert room.as_shown(other) == room


def test_what_fits_is_as_the_search_says() -> None:
    assert _plan_for(ROOMY, RULE, [], MIB) == make_plan(ROOMY, RULE)
