"""Batches and peaks beyond what was planned for are said with their figures, once each."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_osdp.backend import memory
from lightning_osdp.backend.memory import MemoryLimit
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.strategy.run_warnings import RunWarnings, warn_if_device_has_less
from tests.support.models import hand_made_plan

MIB = 1 << 20


def make_warnings() -> RunWarnings:
    plan = hand_made_plan({}, 2, batch_size=4).model_copy(update={"memory_limit_bytes": 520 * MIB})
    predicted = plan.predicted.model_copy(update={"peak_memory_bytes": 470 * MIB})
    return RunWarnings(plan.model_copy(update={"predicted": predicted}), bytes_per_sample=1024.0, rank=1)


def test_larger_batch_warns_with_both_sizes_once_per_size() -> None:
    run = make_warnings()
    with pytest.warns(OSDPWarning, match=r"rank 1 got a batch of 8(.0)? KiB, 2 times the 4(.0)? KiB .* sample_batch"):
        run.on_batch({"a": torch.zeros(4, 512)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.on_batch([torch.zeros(4, 256)])
        run.on_batch({"a": torch.zeros(4, 512)})


def test_peak_above_the_limit_warns_with_limit_and_prediction_once() -> None:
    run = make_warnings()
    text = r"took 775(.0)? MiB of memory at its peak, above the limit of 520(.0)? MiB \(predicted: 470(.0)? MiB\)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.on_step_end(520 * MIB)
    with pytest.warns(OSDPWarning, match=text):
        run.on_step_end(775 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.on_step_end(775 * MIB)


@pytest.mark.parametrize(
    ("needed", "given", "warns"),
    [(400, 520, True), (300, 520, False), (400, None, False)],
    ids=["more than there is", "less than there is", "as detected"],
)
def test_plan_for_more_memory_than_there_is_warns_with_all_figures(
    needed: int, given: int | None, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda *_: 350 * MIB)
    limit = MemoryLimit(torch.device("cpu"), 2, user_limit=given and given * MIB)
    plan = hand_made_plan({}, 2)
    predicted = plan.predicted.model_copy(update={"peak_memory_bytes": needed * MIB})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_device_has_less(plan.model_copy(update={"predicted": predicted}), limit)
    assert bool(caught) == warns
    for each in caught:
        assert each.category is OSDPWarning
        for words in ("takes up to 400.0 MiB under memory_limit='520.0 MiB'", "a rank can have 350.0 MiB here now"):
            assert words in str(each.message)
