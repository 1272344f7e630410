"""Times measured in parts, scaled to what a rehearsal of the whole step took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.cluster import Cluster, ComputeTimes, EngineOverhead, ModeOverhead
from lightning_osdp.planning.cost import communication, engine
from lightning_osdp.planning.joining import Joined
from lightning_osdp.planning.operators import Line, ModelDescription, Operator
from lightning_osdp.planning.rehearsed import MOST, alike, compute_s, rehearsed_compute, rehearsed_engine, rising
from tests.planning.small import blocks_of_one, cluster, compute, linear

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
PLAIN: ComputeTimes = compute(blocks_of_one(3, 2))


def added_s(choices: list[Choice], hardware: Cluster, operators: tuple[Operator, ...] = OPERATORS) -> float:
    pairs = list(zip(operators, choices, strict=True))
    return sum(sum(communication(*pair, hardware)) + sum(engine(*pair, hardware)) for pair in pairs)


@given(low=st.floats(1.4, 2.5), growth=st.floats(1.0, 4.0))
def test_parts_keep_their_shares_and_sum_up_to_the_whole(low: float, growth: float) -> None:
    """Four times the samples take as long, up to four times as long."""
    whole = {2: low * compute_s(PLAIN, 2), 8: low * growth * compute_s(PLAIN, 2)}
    found = rehearsed_compute(PLAIN, whole)
    assert {size: compute_s(found, size) for size in whole} == pytest.approx(whole)
    for size in (2, 5, 8):
        share = PLAIN.operators[0].at(size) / compute_s(PLAIN, size)
        assert found.operators[0].at(size) / compute_s(found, size) == pytest.approx(share)
        split = PLAIN.operators[0].splits[0].forward.at(size) / compute_s(PLAIN, size)
        assert found.operators[0].splits[0].forward.at(size) / compute_s(found, size) == pytest.approx(split)
        assert found.blocks[0].at(size) / compute_s(found, size) == pytest.approx(
            PLAIN.blocks[0].at(size) / compute_s(PLAIN, size)
        )
    assert found.optimizer_s_per_byte == PLAIN.optimizer_s_per_byte


def test_one_batch_size_is_enough_and_nonsense_is_limited() -> None:
    twice = rehearsed_compute(PLAIN, {4: 2 * compute_s(PLAIN, 4)})
    assert compute_s(twice, 4) == pytest.approx(2 * compute_s(PLAIN, 4))
    assert compute_s(twice, 8) == pytest.approx(2 * compute_s(PLAIN, 8))
    absurd = rehearsed_compute(PLAIN, {4: 100 * compute_s(PLAIN, 4)})
    assert compute_s(absurd, 4) == pytest.approx(MOST * compute_s(PLAIN, 4))


def test_rising_lines_are_never_below_nothing() -> None:
    assert rising([(2, 3.0)]) == Line(fixed=3.0)
    assert rising([(2, 3.0), (8, 6.0)]) == Line(fixed=2.0, per_sample=0.5)
    assert rising([(2, 3.0), (8, 1.0)]) == Line(fixed=2.0)
    through_nothing = rising([(1, 1.0), (3, 5.0)])
    assert through_nothing.fixed == 0
    assert through_nothing.per_sample == pytest.approx(1.6)


def test_each_mode_adds_what_was_rehearsed() -> None:
    modes = {mode: [alike(operator, mode) for operator in OPERATORS] for mode in Mode}
    assert modes[Mode.ZDP][2:] == [Choice(), Choice((Mode.ZDP2,))]
    wanted = {mode: factor * added_s(modes[mode], PARTS) for mode, factor in zip(Mode, (1.3, 1.1, 0.8), strict=True)}
    found = PARTS.model_copy(update={"engine": rehearsed_engine(MODEL, PARTS, wanted)})
    for mode in Mode:
        assert added_s(modes[mode], found) == pytest.approx(wanted[mode])
        assert communication(OPERATORS[0], Choice((mode,)), found) == communication(
            OPERATORS[0], Choice((mode,)), PARTS
        )
    assert found.engine.dp.fixed_s == PARTS.engine.dp.fixed_s


def test_units_that_are_shared_have_a_factor_of_their_own() -> None:
    model = ModelDescription(
        fingerprint="", operators=(linear("free"), linear("b.0"), linear("b.1")), moments=(), batch_size=1
    )
    units = ("", "b", "b")
    alone, shared = Joined.of(model, units).model.operators
    kept = Choice((Mode.ZDP2,))
    seconds = {mode: 1.5 * added_s([Choice((mode,))] * 3, PARTS, model.operators) for mode in Mode}
    joined_s = 1.5 * added_s([kept], PARTS, (alone,)) + 1.2 * added_s([kept], PARTS, (shared,))
    found = PARTS.model_copy(update={"engine": rehearsed_engine(model, PARTS, seconds, units, joined_s)})
    assert found.engine.joined == pytest.approx(1.2 / 1.5)
    assert added_s([kept] * 2, found, (alone, shared)) == pytest.approx(joined_s)
    assert added_s([kept], found, (alone,)) == pytest.approx(1.5 * added_s([kept], PARTS, (alone,)))
    dp = Choice()
    assert added_s([dp], found, (shared,)) == pytest.approx(1.5 * added_s([dp], PARTS, (shared,)))


def test_slices_and_second_forwards_go_with_their_mode() -> None:
    wanted = {mode: 2 * added_s([alike(operator, mode) for operator in OPERATORS], PARTS) for mode in Mode}
    found = PARTS.model_copy(update={"engine": rehearsed_engine(MODEL, PARTS, wanted)})
    for choice in (Choice((Mode.ZDP, Mode.ZDP), 1), Choice((Mode.DP,)), Choice((Mode.ZDP2,))):
        before, after = added_s([choice], PARTS, OPERATORS[:1]), added_s([choice], found, OPERATORS[:1])
        assert after == pytest.approx(2 * before)


def test_what_can_not_be_true_changes_little() -> None:
    nothing = rehearsed_engine(MODEL, PARTS, dict.fromkeys(Mode, 0.0))
    assert [nothing.of(mode).factor for mode in Mode] == [pytest.approx(1 / MOST)] * 3
    assert rehearsed_engine(MODEL.model_copy(update={"operators": ()}), PARTS, dict.fromkeys(Mode, 1.0)) == PARTS.engine
