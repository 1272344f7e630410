"""StopIteration from a step: the Trainer would take it for the end of the data, on one rank alone."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_osdp import OSDPStrategy
from lightning_osdp.errors import OSDPError


class Asking(pl.LightningModule):
    """Its validation step asks for the batches by itself, so that it may say that they have ended."""

    def training_step(self, batch: Any, batch_index: int) -> None:
        next(iter(()))

    def validation_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)


def test_stop_iteration_from_a_step_is_an_error_unless_the_step_asks_for_the_batches() -> None:
    strategy = OSDPStrategy()
    strategy._lightning_module = module = Asking()
    with (
        pytest.raises(OSDPError, match="training_step raised StopIteration, which the Trainer would take for the end"),
        strategy._refuse_stop_iteration("training_step"),
    ):
        module.training_step(None, 0)
    with pytest.raises(StopIteration), strategy._refuse_stop_iteration("validation_step"):
        module.validation_step(iter(()))
