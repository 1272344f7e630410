"""What the arguments of OSDPStrategy make of a device's memory."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_osdp import OSDPStrategy
from lightning_osdp.backend import memory
from lightning_osdp.strategy.planning_options import PlanningOptions

CPU = torch.device("cpu")


@pytest.mark.parametrize(("argument", "expected"), [("auto", 8 << 30), ("50%", 4 << 30), ("1GiB", 1 << 30), (77, 77)])
def test_limit_on_device_is_the_amount_or_the_share_that_the_user_allows(
    argument: int | str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda *_: 8 << 30)
    assert PlanningOptions(memory_limit=argument).limit_on(CPU, 2).current() == expected


def test_end_of_a_run_may_use_the_share_that_planning_may() -> None:
    strategy = OSDPStrategy(memory_limit="50%", parallel_devices=[CPU], cluster_environment=LightningEnvironment())
    assert strategy._memory_limit() == memory.MemoryLimit(CPU, 1, share=0.5)
