"""How many steps an epoch has at a batch size, which batch sizes leave enough, and what is said about a change."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.strategy.batch_size_change import Epoch, describe_change, update_hyperparameters
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
    said = describe_change(Epoch(3072), 32, 1, plan, 2)
    assert said == (
        "batch size per device 32 -> 96 (global 64 -> 192), 96 -> 32 optimizer steps per epoch; the learning rate is "
        "yours to adapt; batch_size='keep' keeps yours"
    )
    assert describe_change(Epoch(3072), 96, 1, plan, 2) == ""
    assert "accumulate_grad_batches 2 -> 1" in describe_change(Epoch(None), 96, 2, plan, 2)
    assert describe_change(Epoch(3072), 48, 2, plan, 2) == (
        "batch size per device 48 -> 96 (global 192 -> 192), accumulate_grad_batches 2 -> 1, 32 -> 32 optimizer steps "
        "per epoch; batch_size='keep' keeps yours"
    )


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
