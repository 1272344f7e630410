"""How many steps an epoch has at a batch size, which batch sizes leave enough, and what is said about a change."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.strategy.batch_size_change import Epoch, describe_change, update_hyperparameters
from lightning_osdp.strategy.planning_options import PlanningOptions
from tests.support.models import hand_made_plan


@pytest.mark.parametrize(
    ("epoch", "batch_size", "batches"),
    [
        (Epoch(1024), 32, 32),
        (Epoch(1025), 32, 33),
        (Epoch(1025, drop_last=True), 32, 32),
        (Epoch(1024, limit=10), 32, 10),
        (Epoch(1024, limit=0.5), 32, 16),
        (Epoch(None), 32, None),
    ],
)
def test_epoch_batches_follow_drop_last_and_limit(epoch: Epoch, batch_size: int, batches: int | None) -> None:
    assert epoch.num_batches(batch_size) == batches


@pytest.mark.parametrize(
    ("epoch", "present", "accumulation", "largest"),
    [
        (Epoch(1024), 32, 1, 32),  # 32 steps are fewer than 100: the loader's own is the upper end
        (Epoch(102_400), 32, 1, 1034),  # of which 100 batches are the last that are enough
        (Epoch(102_400, drop_last=True), 32, 1, 1024),
        (Epoch(102_400), 32, 4, 258),
        (Epoch(102_400, limit=0.5), 32, 1, 514),
        (Epoch(102_400, limit=50), 32, 1, 32),
        (Epoch(None), 32, 1, None),
    ],
)
def test_largest_batch_size_leaves_100_steps_or_is_the_loaders(
    epoch: Epoch, present: int, accumulation: int, largest: int | None
) -> None:
    found = epoch.largest_batch_size(present, accumulation, 100)
    assert found == largest
    if found is not None and found != present:
        assert (epoch.num_steps(found, accumulation) or 0) >= 100 > (epoch.num_steps(found + 1, accumulation) or 0)


@pytest.mark.parametrize(
    ("epoch", "largest"),
    [
        (Epoch(1000, validation_interval=50), 20),
        (Epoch(1000, limit=0.5, validation_interval=50), 10),
        (Epoch(1000, validation_interval=900), None),  # it fails with the loader's own as well: not ours to say
        (Epoch(None, validation_interval=50), None),
    ],
)
def test_largest_valid_batch_size_leaves_val_check_interval(epoch: Epoch, largest: int | None) -> None:
    assert epoch.largest_valid(4) == largest


def test_check_batch_size_beyond_val_check_interval_names_both() -> None:
    epoch = Epoch(1000, validation_interval=50)
    epoch.check(20, 4)
    text = (
        r"a batch size of 25 per device \(the loader's is 4\) leaves 40 batches per epoch, fewer than "
        r"val_check_interval=50 needs: use a batch size up to 20"
    )
    with pytest.raises(ConfigurationError, match=text):
        epoch.check(25, 4)


def test_check_batch_size_beyond_the_length_of_the_data_says_how_large_it_may_be() -> None:
    text = r"^a batch size of 8 per device \(the loader's is 4\) leaves no whole batch in an epoch: use .* up to 6$"
    with pytest.raises(ConfigurationError, match=text):
        Epoch(6, drop_last=True).check(8, 4)


def test_describe_change_says_sizes_steps_and_what_to_do() -> None:
    plan = hand_made_plan({}, 2, batch_size=96)
    assert describe_change(Epoch(3072), 32, 1, plan, 2, "this keeps yours") == (
        "batch size per device 32 -> 96 (global 64 -> 192), 96 -> 32 optimizer steps per epoch; the learning rate is "
        "yours to adapt; this keeps yours"
    )
    assert describe_change(Epoch(3072), 96, 1, plan, 2, "this keeps yours") == ""
    assert "accumulate_grad_batches 2 -> 1" in describe_change(Epoch(None), 96, 2, plan, 2, "")
    assert describe_change(Epoch(3072), 48, 2, plan, 2, "") == (
        "batch size per device 48 -> 96 (global 192 -> 192), accumulate_grad_batches 2 -> 1, 32 -> 32 optimizer steps "
        "per epoch"
    )


KEEP = "batch_size='keep' keeps yours"
WITHOUT_PLAN = "the plan that was given says so: batch_size='keep' without it keeps yours"


@pytest.mark.parametrize(
    ("options", "is_given", "remedy"),
    [
        ({}, False, KEEP),
        ({"max_batch_size": 96}, False, KEEP),
        ({"batch_size": 96}, False, ""),
        ({"batch_size": "keep", "global_batch_size": 384}, False, ""),  # the accumulation is as asked for
        ({"global_batch_size": 192}, False, KEEP),
        ({"global_batch_size": 96}, False, ""),  # 32 samples on each of 2 ranks can't make 96
        ({"global_batch_size": "keep"}, False, "batch_size='keep' in place of global_batch_size keeps yours"),
        ({}, True, WITHOUT_PLAN),
        ({"max_batch_size": 96}, True, WITHOUT_PLAN),
        ({"batch_size": 96}, True, ""),
    ],
)
def test_remedy_is_what_keeps_the_batch_size_with_these_arguments(
    options: dict[str, Any], is_given: bool, remedy: str
) -> None:
    plan = hand_made_plan({}, 2, batch_size=96)
    assert PlanningOptions(**options).remedy(plan, 32, 2, is_given) == remedy


def test_changed_accumulation_alone_has_no_remedy_in_the_batch_size() -> None:
    plan = hand_made_plan({}, 2, batch_size=96)
    assert PlanningOptions(global_batch_size=384).remedy(plan, 96, 2, is_given=False) == ""


@pytest.mark.parametrize(
    ("options", "present", "text"),
    [
        ({"batch_size": 32}, 32, r"^plan and batch_size=32 contradict each other: the plan's is 96\. Leave one"),
        ({"batch_size": "keep"}, 32, r"batch_size='keep' .* the plan's is 96, the train dataloader's 32\. Leave"),
        ({"max_batch_size": 64}, 32, "max_batch_size=64 contradict each other: the plan's is 96"),
        ({"global_batch_size": 96}, 32, "global_batch_size=96 contradict each other: the plan's is 192"),
        ({"global_batch_size": "keep"}, 32, "global_batch_size='keep' .* the plan's is 192, the train dataloader's 64"),
        ({}, 32, None),
        ({"batch_size": 96, "max_batch_size": 96, "global_batch_size": 192}, 32, None),
        ({"batch_size": "keep"}, 96, None),
        ({"max_batch_size": 128, "global_batch_size": "keep"}, 96, None),
    ],
)
def test_plan_of_another_batch_size_than_is_asked_for_is_refused(
    options: dict[str, Any], present: int, text: str | None
) -> None:
    plan = hand_made_plan({}, 2, batch_size=96)
    with pytest.raises(ConfigurationError, match=text) if text else nullcontext():
        PlanningOptions(**options).check_sizes(plan, (present, present), 1)


def test_plan_that_keeps_sizes_of_each_rank_has_the_largest() -> None:
    PlanningOptions(batch_size="keep").check_sizes(hand_made_plan({}, 2, batch_size=96), (64, 96), 1)


def test_candidates_end_with_the_largest_allowed() -> None:
    sizes = [size for size, _ in BatchSizePolicy(max_batch_size=33).candidates(1)]
    assert sizes[-2:] == [30, 33]
    assert sizes == sorted(set(sizes))
    assert [size for size, _ in BatchSizePolicy(max_batch_size=1).candidates(1)] == [1]


@dataclass(frozen=True)
class DataConfig:
    """The part of a configuration that is about data."""

    per_device_train_batch_size: int = 4
    val_batch_size: int = 4


def test_hyperparameters_say_the_batch_size_that_is_trained_under_any_name_and_the_users_own_objects_stay() -> None:
    class Module(pl.LightningModule):
        def __init__(
            self, batch_size: int, train_bs: int, val_bs: int, rows: int, cfg: Any, data: Any, args: Any
        ) -> None:
            super().__init__()
            self.save_hyperparameters()

    cfg = {"data": {"batch_size": 4, "batch_size_per_gpu": 3}, "val": {"batch_size": 4}, "layers": [4]}
    args = Namespace(micro_batch_size=4, eval_batch_size=4)
    module = Module(4, 4, 4, 4, cfg, DataConfig(), args)
    trainer: Any = SimpleNamespace(lightning_module=module, datamodule=None)
    update_hyperparameters(trainer, 4, 10)
    for saved in (module.hparams, module.hparams_initial):
        assert [saved[name] for name in ("batch_size", "train_bs", "val_bs", "rows")] == [10, 10, 4, 4]
        assert saved["cfg"] == cfg | {"data": {"batch_size": 10, "batch_size_per_gpu": 3}}
        assert saved["data"] == DataConfig(per_device_train_batch_size=10)
        assert saved["args"] == Namespace(micro_batch_size=10, eval_batch_size=4)
    assert cfg["data"] == {"batch_size": 4, "batch_size_per_gpu": 3}
    assert args.micro_batch_size == 4
