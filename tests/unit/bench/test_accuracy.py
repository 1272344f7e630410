"""``make accuracy``: which models are drawn, and what its summary says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from bench.accuracy.accuracy import HEAD, row, summary
from bench.accuracy.cases import ALLOWANCES, NUM_MODELS, SEED, SHARES, SUBJECTS, Case, draw, guessed, note_allowances
from lightning_osdp import plan
from tests.support.zoo import ZOO


@pytest.fixture
def _undo_patches() -> Iterator[None]:
    yield
    patch.stopall()
    ALLOWANCES.clear()


def make_case(predicted_s: float = 1.0, predicted_bytes: int = 1000, pace: float = 1.0, runs: int = 1) -> Case:
    name = next(iter(SUBJECTS))
    return Case(name, "dp 100%", 4, predicted_s, 1.0, predicted_bytes, 1000, 0, "", (1.0, pace), runs)


def test_draw_is_the_same_for_the_same_seed_and_knows_no_model_of_the_zoo() -> None:
    assert draw(SEED, NUM_MODELS) == SUBJECTS
    assert draw(SEED + 1, NUM_MODELS) != SUBJECTS
    assert len(SUBJECTS) == NUM_MODELS >= 20
    assert not set(SUBJECTS) & set(ZOO)
    assert {subject.limit for subject in SUBJECTS.values()} == set(SHARES)


def test_summary_gives_median_share_within_tolerance_and_worst_error() -> None:
    cases = [make_case(one) for one in (0.95, 1.02, 1.2)]
    assert "3 models. Step time: median error 5.0%, 67% within 10%, worst 20.0%." in summary(cases)


def test_summary_counts_peaks_above_their_prediction_and_runs_at_changing_pace() -> None:
    cases = [make_case(predicted_bytes=size) for size in (980, 800, 1100)]
    cases[0] = replace(cases[0], paces_s=(1.0, 1.2), runs=3)
    text = summary(cases)
    assert "exceeded by more than 3% in 1 of 3 (most: 25.0%), predicted too high by at most 10.0%" in text
    assert "1 were run again" in text
    assert "1 of them saw no steady pace in 3 runs" in text


def test_row_has_a_cell_for_each_column() -> None:
    assert len(row(make_case())) == len(HEAD)


@pytest.mark.usefixtures("_undo_patches")
def test_what_the_planner_reserves_is_noted() -> None:
    note_allowances()
    data = DataLoader(BoringModel().train_dataloader().dataset, batch_size=4)
    found = plan(BoringModel(), data, cluster=guessed(2), batch_size=4, trial_steps=False, cache="")
    assert 0 < ALLOWANCES[-1] <= found.predicted.overhead_bytes
