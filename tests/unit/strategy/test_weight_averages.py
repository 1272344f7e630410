"""What callbacks that average weights add to a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging

import lightning_osdp
from lightning_osdp.planning.spec.model import NonTrainingWork
from lightning_osdp.strategy.weight_averages import count_averaged_copies
from tests.support.modules import GPTModule

MODULE = GPTModule()
BYTES = sum(tensor.nbytes for tensor in (*MODULE.parameters(), *MODULE.buffers()))


@pytest.mark.parametrize(
    ("callback", "is_set_up", "device", "copies", "gathers"),
    [
        (EMAWeightAveraging(), True, "cpu", 0, True),  # it is there: the process takes it already
        (EMAWeightAveraging(), False, "cpu", 1, True),
        (EMAWeightAveraging(), True, "cuda", 0, False),  # on the host, where the module was
        (EMAWeightAveraging(device="cuda"), False, "cuda", 1, True),
        (StochasticWeightAveraging(0.1), True, "cpu", 0, True),
        (StochasticWeightAveraging(0.1), True, "cuda", 0, False),
        (StochasticWeightAveraging(0.1, device=None), True, "cuda", 1, True),  # it moves there when SWA begins
        (Callback(), False, "cpu", 0, False),
    ],
)
def test_copies_count_that_are_not_there_yet(
    callback: Any, is_set_up: bool, device: str, copies: int, gathers: bool
) -> None:
    if is_set_up:
        callback._average_model = MODULE
    trainer: Any = SimpleNamespace(callbacks=[Callback(), callback], lightning_module=MODULE)
    before = NonTrainingWork(checkpoint_memory="streamed")
    found = count_averaged_copies(trainer, torch.device(device), before)
    assert found == before.model_copy(update={"copied_bytes": copies * BYTES, "gathers_parameters": gathers})


def test_plan_for_hardware_counts_the_copy() -> None:
    def peak_bytes(*callbacks: Callback) -> int:
        options: dict[str, Any] = {"hardware": "2xtitan-rtx-pcie3+10gbit", "devices": 2, "batch_size": 2}
        plan = lightning_osdp.plan(GPTModule(), trainer_args={"callbacks": list(callbacks)}, **options)
        return plan.predicted.peak_memory_bytes

    assert peak_bytes(EMAWeightAveraging()) == peak_bytes() + BYTES
