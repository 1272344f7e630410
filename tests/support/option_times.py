"""Compares the search's arrays of times with the time of one operator under one choice."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.cost.neighbours import neighbours_of
from lightning_osdp.planning.cost.step_time import time_cost
from lightning_osdp.planning.search.search_space import SearchSpace
from lightning_osdp.planning.spec.problem import Problem


def assert_option_times_match_time_cost(problem: Problem, batch_size: int, accumulation: int) -> None:
    """Compare all options of a problem, in blocks that are recomputed and that are not."""
    space = SearchSpace(problem)
    times = space.option_times(batch_size, accumulation)
    neighbours = neighbours_of(problem.model, problem.compute)
    operators = zip(problem.model.operators, space.group_of, problem.compute.operators, neighbours, strict=True)
    for operator, group_at, own, beside in operators:
        group = space.option_groups[group_at]
        for row, choice in enumerate(group.choices, group.options.start):
            for recomputed in (False, True):
                expected = time_cost(
                    operator,
                    choice,
                    problem.cluster,
                    problem.compute,
                    own,
                    batch_size,
                    accumulation,
                    recomputed=recomputed,
                    neighbours=beside,
                )
                assert times.communication[int(recomputed), row] == pytest.approx(expected.communication_s, abs=1e-12)
                assert times.compute[int(recomputed), row] == pytest.approx(expected.compute_s, abs=1e-12)
