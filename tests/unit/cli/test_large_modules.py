"""Modules that are planned without being made, and those that are refused: no process is started."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_osdp.cli.large_modules import ModuleMaker
from lightning_osdp.errors import ConfigurationError

BYTES = 4 * (64 * 64 + 64)


class Net(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, width)


class NeedsValues(Net):
    """Reads a weight while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.layer.weight[0, 0].item()


@pytest.mark.parametrize("is_for_planning", [True, False])
def test_module_that_fits_is_made_for_real(is_for_planning: bool) -> None:
    maker = ModuleMaker(BYTES, is_for_planning)
    module = maker(Net, width=64)
    assert module.layer.weight.device.type == "cpu"
    assert module.hparams.width == 64
    assert not maker.is_on_meta


def test_module_that_is_too_large_is_planned_without_memory() -> None:
    maker = ModuleMaker(BYTES - 1, is_for_planning=True)
    assert maker(Net).layer.weight.is_meta
    assert maker.is_on_meta


def test_module_that_is_too_large_to_train_is_refused_before_it_is_made() -> None:
    words = "Net makes 16.2 KiB of parameters when it is built, this device has 1.0 KiB: build them in configure_model"
    with pytest.raises(ConfigurationError, match=words):
        ModuleMaker(1024, is_for_planning=False)(Net)


def test_module_that_needs_values_is_made_for_real() -> None:
    assert isinstance(ModuleMaker(1, is_for_planning=True)(NeedsValues).first, float)


def test_error_of_the_module_itself_is_raised() -> None:
    with pytest.raises(TypeError, match="depth"):
        ModuleMaker(1, is_for_planning=True)(Net, depth=3)
