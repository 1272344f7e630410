"""Times measured in parts, scaled to what a rehearsal of the whole step took."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.choices import Choice, Group, Mode
from lightning_osdp.planning.cluster import (
    MOST_FACTOR,
    Cluster,
    ComputeTimes,
    EngineOverhead,
    Excess,
    ModeOverhead,
)
from lightning_osdp.planning.cost import communication, engine, excess, kinds, time_cost
from lightning_osdp.planning.operators import Line, ModelDescription, Operator
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import (
    Passes,
    Rehearsal,
    alike,
    as_rehearsed,
    copy_bytes,
    decided,
    foreseen,
    passes_s,
    rehearsed_compute,
    rising,
    with_excess,
)
from lightning_osdp.planning.schedule import BatchRule, Problem, make_plan
from tests.models import hand_made_plan, joined, same_levels
from tests.planning.small import MIB, RANKS, blocks_of_one, blocks_of_two, cluster, compute, compute_s, linear

OPERATORS = (
    linear("free.0"),
    linear("free.1", 8),
    linear("pinned").model_copy(update={"pinned": "made so"}),
    linear("twice").model_copy(update={"calls": 2}),
)
MODEL = ModelDescription(fingerprint="", operators=OPERATORS, moments=(), batch_size=1)
PARTS = cluster().model_copy(
    update={
        "engine": EngineOverhead(
            dp=ModeOverhead(fixed_s=1e-4), zdp2=ModeOverhead(fixed_s=1e-3), zdp=ModeOverhead(fixed_s=2e-3)
        )
    }
)
TIMES = compute(MODEL)
PLAIN: ComputeTimes = compute(blocks_of_one(3, 2))


def added_s(choices: list[Choice], hardware: Cluster, operators: tuple[Operator, ...] = OPERATORS) -> float:
    """Of collectives and the engine."""
    pairs = list(zip(operators, choices, strict=True))
    return sum(sum(part(*pair, hardware)) for pair in pairs for part in (communication, engine, excess))


@given(low=st.floats(1.6, 2.2), growth=st.floats(1.0, 4.0), backward=st.floats(0.9, 1.1))
def test_parts_keep_their_shares_of_each_pass_and_sum_up_to_the_whole(
    low: float, growth: float, backward: float
) -> None:
    """Four times the samples take as long, up to four times as long."""
    parts = passes_s(PLAIN, 2)
    whole = {
        size: Passes(factor * parts.forward_s, backward * factor * parts.backward_s)
        for size, factor in ((2, low), (8, low * growth))
    }
    found = rehearsed_compute(PLAIN, whole)
    assert {size: passes_s(found, size) for size in whole} == {
        size: pytest.approx(passes) for size, passes in whole.items()
    }
    before, after = PLAIN.operators[0], found.operators[0]
    for size in (2, 5, 8):
        forward, backward_ = (
            now / then for now, then in zip(passes_s(found, size), passes_s(PLAIN, size), strict=True)
        )
        assert after.forward.at(size) / before.forward.at(size) == pytest.approx(forward)
        assert after.backward.at(size) / before.backward.at(size) == pytest.approx(backward_)
        assert after.splits[0].forward.at(size) / before.splits[0].forward.at(size) == pytest.approx(forward)
        assert after.splits[0].backward.at(size) / before.splits[0].backward.at(size) == pytest.approx(backward_)
        assert found.blocks[0].at(size) / PLAIN.blocks[0].at(size) == pytest.approx(forward)
    assert found.optimizer_s_per_byte == PLAIN.optimizer_s_per_byte


def test_one_batch_size_is_enough_and_nonsense_is_limited() -> None:
    def times(factor: float) -> Passes:
        return Passes(*(factor * seconds for seconds in passes_s(PLAIN, 4)))

    twice = rehearsed_compute(PLAIN, {4: times(2)})
    assert compute_s(twice, 4) == pytest.approx(2 * compute_s(PLAIN, 4))
    assert compute_s(twice, 8) == pytest.approx(2 * compute_s(PLAIN, 8))
    absurd = rehearsed_compute(PLAIN, {4: times(100)})
    assert compute_s(absurd, 4) == pytest.approx(MOST_FACTOR * compute_s(PLAIN, 4))


def test_rising_lines_are_never_below_nothing() -> None:
    assert rising([(2, 3.0)]) == Line(fixed=3.0)
    assert rising([(2, 3.0), (8, 6.0)]) == Line(fixed=2.0, per_sample=0.5)
    assert rising([(2, 3.0), (8, 1.0)]) == Line(fixed=2.0)
    through_nothing = rising([(1, 1.0), (3, 5.0)])
    assert through_nothing.fixed == 0
    assert through_nothing.per_sample == pytest.approx(1.6)


def searched(model: ModelDescription, limit_mib: int, hardware: Cluster) -> ExecutionPlan:
    try:
        return make_plan(Problem(model, hardware, compute(model), limit_mib * MIB), BatchRule(batch_size=2))
    except InfeasibleError:
        reject()


@given(
    count=st.integers(1, 4),
    several=st.booleans(),
    limit_mib=st.integers(16, 120),
    latency_ms=st.sampled_from([0.0, 5.0]),
    overlap=st.sampled_from([0.0, 0.5]),
)
def test_what_is_foreseen_is_what_the_planner_predicts(
    count: int, several: bool, limit_mib: int, latency_ms: float, overlap: float
) -> None:
    """With slices, units that operators share, and blocks that are recomputed, whatever the search takes."""
    model = blocks_of_two(count) if several else blocks_of_one(count, 2)
    hardware = cluster(latency_ms=latency_ms).model_copy(update={"engine": PARTS.engine, "overlap": overlap})
    plan = searched(model, limit_mib, hardware)
    found = foreseen(model, compute(model), hardware, plan, 2)
    assert found.took_s == found.foreseen_s == pytest.approx(plan.predicted.step_time_s)
    biased = hardware.model_copy(update={"engine": EngineOverhead(**dict(PARTS.engine) | {"excess": Excess(dp=1.0)})})
    assert foreseen(model, compute(model), biased, plan, 2) == found, "what is known already does not count"


@given(count=st.integers(1, 4), several=st.booleans(), limit_mib=st.integers(16, 120))
def test_a_copy_takes_no_more_than_training_beside_the_whole_parameters(
    count: int, several: bool, limit_mib: int
) -> None:
    model = blocks_of_two(count) if several else blocks_of_one(count, 2)
    plan = searched(model, limit_mib, cluster())
    whole = sum(
        p.parameter_bytes
        for operator, made in zip(model.operators, plan.operators, strict=True)
        for p in operator.parameters
        if made.slices == (Mode.DP,)
    )
    gradients = sum(p.gradient_bytes for operator in model.operators for p in operator.parameters)
    needed = copy_bytes(model, plan.cluster, plan, 2)
    assert gradients / RANKS <= needed <= plan.predicted.peak_memory_bytes - whole


def test_a_copy_needs_no_room_for_gradients_that_the_plan_does_not_keep() -> None:
    model = blocks_of_one(8, 2)
    plan = hand_made_plan({operator.name: Mode.ZDP for operator in model.operators}, RANKS)
    at_once = plan.model_copy(update={"update_in_backward": True})
    gradients = [p.gradient_bytes / RANKS for operator in model.operators for p in operator.parameters]
    usual, less = (copy_bytes(model, plan.cluster, each, 0) for each in (plan, at_once))  # activations aside
    assert usual - less == sum(gradients) - max(gradients)


def rehearsal(plan: ExecutionPlan, shares: Mapping[str, float], error: float) -> Rehearsal:
    """Kinds of operators took more than their parts by ``shares``."""
    expected = foreseen(MODEL, TIMES, PARTS, plan, 1)
    more_s = sum(seconds * shares.get(kind, 0.0) for kind, seconds in expected.added_s.items())
    return expected.model_copy(update={"took_s": expected.foreseen_s + more_s, "error": error})


def uniform(mode: Mode) -> ExecutionPlan:
    return hand_made_plan({operator.name: alike(operator, mode).slices[0] for operator in OPERATORS}, RANKS)


def split(plan: ExecutionPlan) -> ExecutionPlan:
    """The first operator in two slices."""
    first, *others = plan.operators
    cut = first.model_copy(update={"slices": first.slices * 2, "split_dim": 1})
    return plan.model_copy(update={"operators": (cut, *others)})


def known(*rehearsals: Rehearsal) -> Cluster:
    return PARTS.model_copy(update={"engine": with_excess(PARTS.engine, rehearsals)})


def test_sure_rehearsals_decide_what_each_mode_adds() -> None:
    shares = {"dp": 0.3, "zdp2": 0.1, "zdp": -0.2}
    hardware = known(*(rehearsal(uniform(mode), shares, 1e-5) for mode in Mode))
    for mode in Mode:
        choices = [alike(operator, mode) for operator in OPERATORS]
        pairs = zip(OPERATORS, choices, strict=True)
        wanted = sum(added_s([one], PARTS, (operator,)) * (1 + shares[one.slices[0]]) for operator, one in pairs)
        assert added_s(choices, hardware) == pytest.approx(wanted, rel=1e-3)
        assert communication(OPERATORS[0], Choice((mode,)), hardware) == communication(
            OPERATORS[0], Choice((mode,)), PARTS
        )


def test_slices_and_shared_units_are_told_apart_from_their_mode() -> None:
    uniform_ones = [rehearsal(uniform(mode), {}, 1e-3) for mode in Mode]
    cut = rehearsal(split(uniform(Mode.ZDP)), {"split": 0.5}, 1e-3)
    found = known(*uniform_ones, cut).engine.excess
    assert found.split > 0.3
    assert max(abs(found.dp), abs(found.zdp2), abs(found.zdp)) < 0.1
    together = joined(uniform(Mode.ZDP2), ["free"])
    found = known(*uniform_ones, rehearsal(together, {"joined": -0.4}, 1e-3)).engine.excess
    assert found.joined < -0.25
    assert found.split == pytest.approx(0.0, abs=1e-6)


def test_what_is_sharded_inside_nodes_is_told_apart_from_the_world() -> None:
    two_levels = {"nodes": 2, "devices_per_node": RANKS // 2, "levels": same_levels(PARTS.link)}
    nodes = PARTS.model_copy(update=two_levels)
    everywhere = uniform(Mode.ZDP)
    inside = [op.model_copy(update={"sharding_group": Group.NODE}) for op in everywhere.operators]
    expected = [
        foreseen(MODEL, TIMES, nodes, plan, 1)
        for plan in (everywhere, everywhere.model_copy(update={"operators": tuple(inside)}))
    ]
    assert [set(one.added_s) - {"dp", "zdp2"} for one in expected] == [{"zdp"}, {"zdp", "node"}]
    half = expected[1].foreseen_s - expected[1].added_s["node"] / 2
    shown = [expected[0], expected[1].model_copy(update={"took_s": half})]
    found = with_excess(PARTS.engine, [one.model_copy(update={"error": 1e-3}) for one in shown]).excess
    assert found.node + found.zdp == pytest.approx(-0.5, abs=0.05)
    assert abs(found.zdp) < 0.1


@given(factor=st.floats(0.5, 2.0))
def test_a_noisy_clock_changes_little_and_several_alike_more(factor: float) -> None:
    one = foreseen(MODEL, TIMES, PARTS, uniform(Mode.ZDP), 1)
    noisy = one.model_copy(update={"took_s": one.took_s * factor, "error": 100.0})
    assert known(noisy).engine.excess.zdp == pytest.approx(0.0, abs=1e-2)
    usual = noisy.model_copy(update={"error": 0.3})
    once, thrice = (known(*[usual] * times).engine.excess.zdp for times in (1, 3))
    assert abs(once) <= abs(thrice) + 1e-9
    assert once * (factor - 1) >= 0


def test_a_plan_that_was_rehearsed_itself_takes_what_it_took() -> None:
    """However many others say something else."""
    plan = split(uniform(Mode.ZDP)).model_copy(update={"cluster": PARTS, "accumulate_grad_batches": 2})
    expected = foreseen(MODEL, TIMES, PARTS, plan, 1)
    others = [rehearsal(uniform(mode), {}, 1e-3) for mode in Mode]
    slower = expected.model_copy(update={"took_s": 1.5 * expected.foreseen_s, "error": 0.5})
    known_plan = plan.model_copy(update={"cluster": known(*others, slower)})
    assert as_rehearsed(known_plan, others) == known_plan
    found, before = as_rehearsed(known_plan, [*others, slower]).predicted, plan.predicted
    rest_s = 2 * 0.5 * expected.foreseen_s
    assert found.step_time_s - before.step_time_s == pytest.approx(rest_s, rel=0.1)
    assert found.compute_time_s == pytest.approx(before.compute_time_s)
    assert found.step_time_s == pytest.approx(found.compute_time_s + found.communication_time_s)
    assert found.samples_per_s * found.step_time_s == pytest.approx(before.samples_per_s * before.step_time_s)
    once_more = known_plan.model_copy(update={"accumulate_grad_batches": 1})
    waited = slower.model_copy(update={"waited_s": 0.125 * slower.took_s})
    told = as_rehearsed(once_more, [waited, waited]).predicted
    assert told.step_time_s == as_rehearsed(once_more, [slower]).predicted.step_time_s
    assert told.communication_time_s == pytest.approx(0.125 * slower.took_s)
    assert told.compute_time_s == pytest.approx(told.step_time_s - told.communication_time_s)
    faster = slower.model_copy(update={"took_s": 0.0})
    assert as_rehearsed(known_plan, [faster]).predicted.communication_time_s == 0.0


@given(share=st.floats(-0.6, 0.6), batch_size=st.integers(1, 8), recomputed=st.booleans())
def test_what_goes_beyond_the_parts_counts_as_communication(share: float, batch_size: int, recomputed: bool) -> None:
    """Or a run would teach that compute is slower than it is, and collectives faster."""
    biased = known(rehearsal(uniform(Mode.ZDP), {"zdp": share}, 1e-4))
    for operator, time in zip(OPERATORS, TIMES.operators, strict=True):
        given_ = operator, alike(operator, Mode.ZDP)
        before, after = (
            time_cost(*given_, hardware, TIMES, time, batch_size, recomputed=recomputed) for hardware in (PARTS, biased)
        )
        assert after.compute_s == before.compute_s
        if given_[1].slices == (Mode.ZDP,):
            assert (after.communication_s - before.communication_s) * share >= 0


def test_nothing_rehearsed_is_nothing_learnt() -> None:
    assert known() == PARTS
    right = foreseen(MODEL, TIMES, PARTS, uniform(Mode.DP), 1)
    assert set(dict(known(right).engine.excess).values()) == {0.0}


def test_what_can_not_be_true_changes_little() -> None:
    assert Excess(dp=100.0).of(["dp"]) == MOST_FACTOR - 1
    assert Excess(zdp=-5.0, split=1.0).of(["zdp", "split"]) == 1 / MOST_FACTOR - 1


def test_kinds_of_operators() -> None:
    shared = linear("block").model_copy(update={"joins": 2})
    assert kinds(shared, Choice((Mode.DP,))) == ["dp"]
    assert kinds(shared, Choice((Mode.ZDP2,))) == ["zdp2", "joined"]
    assert kinds(OPERATORS[0], Choice((Mode.DP, Mode.ZDP2), 1)) == ["zdp2", "split"]
    assert kinds(shared, Choice((Mode.ZDP2,), group=Group.NODE)) == ["zdp2", "joined", "node"]
    assert kinds(OPERATORS[0], Choice((Mode.ZDP,), two_stage=True)) == ["zdp", "two_stage"]
    assert kinds(OPERATORS[0], Choice((Mode.DP,), group=Group.NODE)) == ["dp"]


def test_plans_that_do_the_same_have_one_name() -> None:
    plan = uniform(Mode.ZDP2)
    same = plan.model_copy(update={"memory_limit_bytes": 5, "predicted": uniform(Mode.DP).predicted})
    assert decided(same) == decided(plan)
    others = [plan.model_copy(update=change) for change in ({"batch_size": 2}, {"recomputed": ("free",)})]
    others += [split(plan), joined(plan, ["free"]), uniform(Mode.DP)]
    assert len({decided(one) for one in (plan, *others)}) == len(others) + 1
