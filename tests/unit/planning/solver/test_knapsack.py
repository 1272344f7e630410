"""The search against brute force, against a MILP solver, and against cases worked out by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.solver import Option, solve
from lightning_osdp.planning.solver.knapsack import MIN_DISTINCT_S

Menus = Sequence[Sequence[Option]]
EVERYTHING = 1 << 60


def peak_bytes(menus: Menus, choices: Sequence[int]) -> int:
    chosen = [menu[choice] for menu, choice in zip(menus, choices, strict=True)]
    return sum(option.resident_bytes for option in chosen) + max(option.transient_bytes for option in chosen)


def time_s(menus: Menus, choices: Sequence[int]) -> float:
    return math.fsum(menu[choice].time_s for menu, choice in zip(menus, choices, strict=True))


def brute_force(menus: Menus, budget_bytes: int) -> tuple[float | None, int]:
    """Least time within the budget (None: nothing fits) and least peak of all."""
    plans = list(itertools.product(*(range(len(menu)) for menu in menus)))
    times = [time_s(menus, plan) for plan in plans if peak_bytes(menus, plan) <= budget_bytes]
    return min(times, default=None), min(peak_bytes(menus, plan) for plan in plans)


def needed_bytes(menus: Menus) -> int:
    with pytest.raises(InfeasibleError) as caught:
        solve(menus, -1)
    return caught.value.needed_bytes


def random_menus(random_: random.Random, operators: int, options: int, kinds: int | None = None) -> list[list[Option]]:
    """Menus on which less memory takes more time, by no fixed rate."""

    def menu() -> list[Option]:
        size = random_.randint(100, 10_000)
        shares = sorted(random_.random() for _ in range(options))
        return [
            Option(
                size * (1.2 - share) * random_.uniform(0.8, 1.2), int(size * share), random_.choice([0, 50, 400, 2000])
            )
            for share in shares
        ]

    if kinds is None:
        return [menu() for _ in range(operators)]
    drawn = [menu() for _ in range(kinds)]
    return [random_.choice(drawn) for _ in range(operators)]


# --- brute force ------------------------------------------------------------------------------------------------------

amounts = st.one_of(st.integers(0, 3), st.integers(0, 50), st.integers(0, 10**13), st.sampled_from([0, 10**13, 2**40]))
seconds = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 0.1, 0.2, 0.3, 1e-9, 1e6]),
    st.floats(0, 10),
    st.floats(0, 1e9, allow_subnormal=True),
)
options_ = st.builds(Option, seconds, amounts, amounts)
menus_ = st.lists(st.lists(options_, min_size=1, max_size=5), min_size=1, max_size=4).flatmap(
    lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=6)
)
small_options = st.builds(Option, st.integers(0, 4).map(float), st.integers(0, 4), st.integers(0, 3))
small_menus = st.lists(st.lists(small_options, min_size=1, max_size=3), min_size=1, max_size=7)


def check_against_brute_force(menus: Menus, budget_bytes: int) -> None:
    best, least = brute_force(menus, budget_bytes)
    if best is None:
        with pytest.raises(InfeasibleError) as caught:
            solve(menus, budget_bytes)
        assert caught.value.needed_bytes == least
        assert caught.value.budget_bytes == budget_bytes
        return
    solution = solve(menus, budget_bytes)
    assert solution.optimal
    assert solution.lower_bound_s == solution.time_s == time_s(menus, solution.choices)
    assert solution.peak_bytes == peak_bytes(menus, solution.choices) <= budget_bytes
    assert solution.time_s <= best * (1 + 1e-12) + MIN_DISTINCT_S


@given(menus_, st.data())
@settings(max_examples=150, deadline=None)
def test_solve_adversarial_sizes_matches_brute_force(menus: Menus, data: st.DataObject) -> None:
    _, least = brute_force(menus, 0)
    most = sum(max(option.resident_bytes + option.transient_bytes for option in menu) for menu in menus)
    budget = data.draw(st.one_of(st.integers(max(0, least - 2), least + 3), st.integers(least, most), st.just(0)))
    check_against_brute_force(menus, budget)


@given(small_menus, st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_solve_ties_matches_brute_force(menus: Menus, budget_bytes: int) -> None:
    check_against_brute_force(menus, budget_bytes)


@pytest.mark.parametrize("seed", range(20))
def test_solve_memory_for_time_options_matches_brute_force(seed: int) -> None:
    random_ = random.Random(seed)
    menus = random_menus(random_, 7, 4, kinds=random_.choice([2, 3, None]))
    least, most = needed_bytes(menus), solve(menus, EVERYTHING).peak_bytes
    for share in (0.0, 0.2, 0.5, 0.9):
        check_against_brute_force(menus, int(least + share * (most - least)))


def test_solve_handles_times_of_very_different_magnitude() -> None:
    menus = [[Option(1e30, 0, 0), Option(1.0, 10, 0), Option(0.5, 11, 0)], [Option(1e-30, 10, 0), Option(2e-30, 0, 0)]]
    assert solve(menus, 11).choices == (2, 1)
    assert solve(menus, 10).choices == (1, 1)
    assert solve(menus, 0).choices == (0, 1)


def test_solve_poor_initial_incumbent_keeps_small_times_precise() -> None:
    menu = [Option(0.0, 2, 1), Option(1e6, 0, 0), Option(1e-7, 0, 1), Option(1e-38, 0, 2)]
    assert solve([menu], 2).choices == (3,)
    assert solve([menu] * 3, 2).choices == (3, 3, 3)


# --- the maximum ------------------------------------------------------------------------------------------------------


def test_solve_lowers_largest_transient_where_that_saves_time() -> None:
    """The first operator's fast option takes a transient of 60. Without it, both others fit when fast:

    20 + 40 + 40 + 10 = 110 bytes and 4 + 1 + 1 = 6 s; with it only 20 + 10 + 10 + 60 = 100 and 1 + 5 + 5 = 11 s, as
    20 + 40 + 10 + 60 = 130. One byte less, and one of the others is slow: 4 + 1 + 5 = 10 s.
    """
    first = [Option(1.0, 20, 60), Option(4.0, 20, 10)]
    other = [Option(1.0, 40, 10), Option(5.0, 10, 10)]
    solution = solve([first, other, other], 110)
    assert solution.choices == (1, 0, 0)
    assert solution.time_s == 6.0
    assert solution.peak_bytes == 110
    assert solve([first, other, other], 109).time_s == 10.0
    assert solve([first, other, other], 129).time_s == 6.0
    assert solve([first, other, other], 160).time_s == 3.0


def test_solve_counts_only_largest_transient() -> None:
    menus = [[Option(1.0, 10, 100), Option(9.0, 10, 0)]] * 5
    assert solve(menus, 150).choices == (0,) * 5
    assert solve(menus, 149).choices == (1,) * 5


# --- against HiGHS ----------------------------------------------------------------------------------------------------


def solve_with_highs(menus: Menus, budget_bytes: int) -> tuple[list[int], float]:
    """The choices of scipy's MILP solver and its lower bound in seconds.

    Its gap is absolute (1e-6), so the objective is scaled up; its feasibility is to a tolerance, so callers check.
    """
    operators, options = len(menus), [option for menu in menus for option in menu]
    owner = [index for index, menu in enumerate(menus) for _ in menu]
    columns = np.arange(len(options))
    unit = max(1.0, budget_bytes / 1e6)
    resident = np.array([option.resident_bytes for option in options]) / unit
    transient = np.array([option.transient_bytes for option in options]) / unit
    largest = len(options)
    entries = [
        (np.ones(len(options)), np.array(owner), columns),
        (resident, np.full(len(options), operators), columns),
        (transient, operators + 1 + np.array(owner), columns),
        (np.ones(1), np.array([operators]), np.array([largest])),
        (-np.ones(operators), operators + 1 + np.arange(operators), np.full(operators, largest)),
    ]
    values, rows, cols = (np.concatenate(column) for column in zip(*entries, strict=True))
    matrix = coo_array((values, (rows, cols)), shape=(2 * operators + 1, largest + 1)).tocsr()
    upper = np.concatenate([np.ones(operators), [budget_bytes / unit], np.zeros(operators)])
    lower = np.concatenate([np.ones(operators), np.full(operators + 1, -np.inf)])
    cost = np.array([option.time_s for option in options] + [0.0])
    scale = 1e5 / cost.max()
    result = milp(
        cost * scale,
        integrality=np.append(np.ones(largest), 0),
        bounds=Bounds(0, np.append(np.ones(largest), np.inf)),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"mip_rel_gap": 0.0},
    )
    assert result.status == 0, result.message
    ends = np.cumsum([len(menu) for menu in menus])[:-1]
    return [int(np.argmax(part)) for part in np.split(result.x[:-1], ends)], result.mip_dual_bound / scale


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_solve_matches_highs_optimum(block: int) -> None:
    """100 instances in all, 10 in each block."""
    for seed in range(10 * block, 10 * block + 10):
        random_ = random.Random(seed)
        kinds = random_.choice([None, None, 6])
        menus = random_menus(random_, random_.randint(50, 200), random_.randint(2, 3), kinds)
        least, most = needed_bytes(menus), solve(menus, EVERYTHING).peak_bytes
        budget = int(least + random_.uniform(0.05, 0.95) * (most - least))
        ours = solve(menus, budget)
        assert ours.optimal
        assert ours.peak_bytes == peak_bytes(menus, ours.choices) <= budget
        choices, bound_s = solve_with_highs(menus, budget)
        theirs_s, theirs_bytes = time_s(menus, choices), peak_bytes(menus, choices)
        assert ours.time_s >= bound_s * (1 - 1e-9)
        if theirs_bytes <= budget:
            assert ours.time_s == pytest.approx(theirs_s, rel=1e-9)
        else:
            # It took a little more than it may: with as much, so can we.
            assert solve(menus, theirs_bytes).time_s <= theirs_s * (1 + 1e-9)


def affine_menus(seed: int, operators: int) -> list[list[Option]]:
    """The paper's equation 2, dp and zdp: a latency for each operator, and a time proportional to its bytes.

    The hardest kind: almost all operators gain the same time per byte.
    """
    random_ = random.Random(seed)
    sizes = [int(10 ** random_.uniform(5.5, 7.5)) for _ in range(operators)]
    return [
        [
            Option(passes * (1e-4 + 1e-10 * size), held * size, 8 * size // cut)
            for passes, held in ((2, 16), (3, 2))
            for cut in (1, 2)
        ]
        for size in sizes
    ]


@pytest.mark.parametrize("seed", range(3))
def test_solve_equal_gain_per_byte_matches_highs_optimum(seed: int) -> None:
    menus = affine_menus(seed, 20)
    budget = (needed_bytes(menus) + solve(menus, EVERYTHING).peak_bytes) // 2
    ours = solve(menus, budget)
    choices, bound_s = solve_with_highs(menus, budget)
    assert ours.optimal
    assert ours.time_s >= bound_s * (1 - 1e-9)
    assert ours.time_s <= time_s(menus, choices) * (1 + 1e-9) or peak_bytes(menus, choices) > budget


@pytest.mark.parametrize(("seed", "operators"), [(0, 96), (1, 96), (2, 200), (2, 400)])
def test_solve_equal_gain_per_byte_proves_optimality(seed: int, operators: int) -> None:
    """The relaxation spends on fractions of operators here; only by branching does its bound come close."""
    menus = affine_menus(seed, operators)
    least, most = needed_bytes(menus), solve(menus, EVERYTHING).peak_bytes
    for share in (0.2, 0.5, 0.8):
        solution = solve(menus, int(least + share * (most - least)))
        assert solution.optimal
        assert solution.time_s * (1 - 1e-9) <= solution.lower_bound_s <= solution.time_s
        assert solution.time_s == time_s(menus, solution.choices)
        assert solution.peak_bytes == peak_bytes(menus, solution.choices)


# --- groups, limits, frontier -----------------------------------------------------------------------------------------


def test_solve_identical_operators_uses_fast_option_as_often_as_fits() -> None:
    """1000 operators are alike; as many are fast as fit: (3500 - 1000) // 7 of them."""
    menus = [[Option(1.0, 8, 0), Option(3.0, 1, 0)]] * 1000
    solution = solve(menus, 3500)
    assert solution.optimal
    assert solution.choices == (0,) * 357 + (1,) * 643
    assert solution.time_s == 357 + 3 * 643
    assert solution.peak_bytes == 357 * 8 + 643
    assert solution.memory_shadow_price == pytest.approx(2 / 7)


def test_solve_identical_operators_mixes_all_three_options() -> None:
    """Nine bytes over: four steps of 2 and, for the odd one, a step of 3 of which the hull knows nothing."""
    menus = [[Option(10.0, 0, 0), Option(8.0, 2, 0), Option(7.5, 3, 0)]] * 20
    solution = solve(menus, 9)
    assert sorted(solution.choices) == [0] * 16 + [1, 1, 1, 2]
    assert solution.time_s == 16 * 10 + 3 * 8 + 7.5


@pytest.mark.parametrize("operators", [40, 400])
def test_solve_identical_operators_matches_solving_them_separately(operators: int) -> None:
    """A difference of a billionth in time keeps operators apart, and moves the optimum by no more than that."""
    random_ = random.Random(operators)
    menus = random_menus(random_, operators, 3, kinds=4)
    apart = [
        [option._replace(time_s=option.time_s * (1 + 1e-9 * random_.random())) for option in menu] for menu in menus
    ]
    least, most = needed_bytes(menus), solve(menus, EVERYTHING).peak_bytes
    budget = (least + most) // 2
    assert solve(menus, budget).time_s == pytest.approx(solve(apart, budget).time_s, rel=2e-9)


def test_solve_is_independent_of_operator_and_option_order() -> None:
    random_ = random.Random(5)
    menus = random_menus(random_, 60, 5)
    budget = (needed_bytes(menus) + solve(menus, EVERYTHING).peak_bytes) // 2
    shuffled = [random_.sample(menu, len(menu)) for menu in random_.sample(menus, len(menus))]
    assert solve(shuffled, budget).time_s == pytest.approx(solve(menus, budget).time_s, rel=1e-12)


def test_solve_is_deterministic() -> None:
    menus = random_menus(random.Random(3), 100, 6, kinds=9)
    budget = (needed_bytes(menus) + solve(menus, EVERYTHING).peak_bytes) // 2
    assert len({solve(menus, budget) for _ in range(3)}) == 1


def test_solve_prefers_smaller_peak_among_equal_times() -> None:
    assert (
        solve([[Option(1.0, 9, 0), Option(1.0, 5, 2), Option(1.0, 5, 1), Option(2.0, 0, 0)]] * 3, 100).choices
        == (2,) * 3
    )


def test_solve_memory_shadow_price_matches_time_gained_per_byte() -> None:
    """Between two budgets time falls by about their difference times the price at either."""
    menus = random_menus(random.Random(2), 400, 6)
    budget = (needed_bytes(menus) + solve(menus, EVERYTHING).peak_bytes) // 2
    more = budget + budget // 100
    before, after = solve(menus, budget), solve(menus, more)
    gained = (before.time_s - after.time_s) / (more - budget)
    assert after.memory_shadow_price * 0.95 <= gained <= before.memory_shadow_price * 1.05
    assert solve(menus, EVERYTHING).memory_shadow_price == 0.0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_solve_infeasible_names_needed_bytes_and_largest_operator() -> None:
    small, large = [Option(1.0, 5, 1), Option(2.0, 3, 4)], [Option(1.0, 50, 0), Option(5.0, 20, 10)]
    with pytest.raises(InfeasibleError, match=r"35 bytes: at least 36 are needed.* number 1") as caught:
        solve([small, large, small], 35)
    assert (caught.value.needed_bytes, caught.value.budget_bytes, caught.value.largest) == (36, 35, 1)
    assert solve([small, large, small], 36).choices == (1, 1, 1)


def test_solve_without_operators_returns_empty_solution() -> None:
    solution = solve([], 0)
    assert (solution.choices, solution.time_s, solution.peak_bytes, solution.optimal) == ((), 0.0, 0, True)
    with pytest.raises(InfeasibleError):
        solve([], -1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (Option(-1.0, 0, 0), "time_s of operator 1 is -1.0"),
        (Option(math.nan, 0, 0), "time_s of operator 1 is nan"),
        (Option(math.inf, 0, 0), "time_s of operator 1 is inf"),
        (Option(0.0, -1, 0), "resident_bytes of operator 1 is -1"),
        (Option(0.0, 0, -5), "transient_bytes of operator 1 is -5"),
        (Option(0.0, 1.5, 0), "resident_bytes has to be"),  # type: ignore[arg-type]
        (Option(0.0, 1 << 61, 0), "more bytes"),
        (Option(0.0, 0, 1 << 70), "transient_bytes has to be"),
    ],
)
def test_solve_rejects_invalid_option_values(option: Option, message: str) -> None:
    fine = Option(1.0, 1, 1)
    with pytest.raises(ValueError, match=message):
        solve([[fine], [fine, option]], 100)


def test_solve_rejects_operator_without_options() -> None:
    with pytest.raises(ValueError, match="menu of operator 1 is empty"):
        solve([[Option(1.0, 1, 1)], []], 100)
