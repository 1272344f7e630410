"""Copies of the module that Lightning's callbacks average, and what of them a plan has to leave room for."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_osdp.planning.spec.model import NonTrainingWork


def count_averaged_copies(trainer: pl.Trainer, device: torch.device, work: NonTrainingWork) -> NonTrainingWork:
    """Return ``work`` with what EMA and SWA take of ``device``: copies that are not there yet, and gathered parameters.

    Copies that are there count as memory that the process takes besides the model.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = [each for each in callbacks if isinstance(each, StochasticWeightAveraging | WeightAveraging)]
    module = trainer.lightning_module
    module_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    places = [(_present_type(each), _final_type(each, device)) for each in averaging]
    coming = sum(device.type == after != before for before, after in places)
    gathers = any(after == device.type for _, after in places)  # for a copy elsewhere, one after the other
    return work.model_copy(update={"copied_bytes": coming * module_bytes, "gathers_parameters": gathers})


def _present_type(callback: StochasticWeightAveraging | WeightAveraging) -> str:
    """Return the type of the device that a callback's copy is on now; empty before there is one."""
    copy = callback._average_model
    return "" if copy is None else next((parameter.device.type for parameter in copy.parameters()), "")


def _final_type(callback: StochasticWeightAveraging | WeightAveraging, device: torch.device) -> str:
    """Return the type of the device that a callback's copy is on while it is averaged."""
    if callback._device is not None:
        return torch.device(callback._device).type
    # Without a device it is where the module is: for WeightAveraging in setup, which is on the host, for SWA later.
    return device.type if isinstance(callback, StochasticWeightAveraging) else "cpu"
