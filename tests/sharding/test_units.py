"""The parts of a unit that can be looked at without a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_osdp.planning.choices import Mode
from lightning_osdp.sharding.fairscale import FairScaleEngine, _joined
from lightning_osdp.sharding.gathers import GATHERS_IN_FLIGHT, GatherBound
from tests.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, two_groups


class Device:
    """A CUDA device in slow motion: events happen when ``synchronize`` is asked for them."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.recorded = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Stands in for torch.cuda's events."""
    device = Device()

    class Event:
        def record(self, stream: Any) -> None:
            self.number = device.recorded
            device.recorded += 1

        def synchronize(self) -> None:
            device.waited.append(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return device


def test_gathers_wait_until_two_others_have_been_freed(device: Device) -> None:
    bound = GatherBound(GATHERS_IN_FLIGHT)
    waits = []
    for _ in range(5):  # five operators: gather, run, free, with the host far ahead of the device
        bound.before_gather()
        waits.append(list(device.waited))
        bound.after_free()
    assert waits == [[], [], [0], [0, 1], [0, 1, 2]]


def test_gathers_that_are_kept_do_not_block(device: Device) -> None:
    bound = GatherBound(GATHERS_IN_FLIGHT)
    for _ in range(10):  # zdp2: nothing is freed in the forward
        bound.before_gather()
    assert device.waited == []


def test_chunks_side_by_side_are_joined_without_a_copy() -> None:
    whole = torch.arange(12.0)
    assert _joined(list(whole.chunk(3))).data_ptr() == whole.data_ptr()
    assert torch.equal(_joined(list(whole.chunk(3))), whole)


def test_padded_or_foreign_chunks_are_copied() -> None:
    whole = torch.arange(10.0)
    chunks = list(whole.chunk(3))
    chunks[-1] = torch.nn.functional.pad(chunks[-1], (0, 2))
    assert torch.equal(_joined(chunks), torch.cat([whole, torch.zeros(2)]))
    swapped = [whole[5:], whole[:5]]
    assert torch.equal(_joined(swapped), torch.cat(swapped))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", list(Mode))
def test_one_cuda_rank_trains_like_the_cpu(mode: Mode, tmp_path: Any) -> None:
    torch.distributed.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        states = []
        for device in (torch.device("cpu"), torch.device("cuda", 0)):
            torch.manual_seed(1)
            model = TinyGPT().to(device)
            optimizer = two_groups(model)
            if device.type == "cuda":
                engine = FairScaleEngine(device)
                engine.apply(model, hand_made_plan(modes_for(model, mode), 1), [optimizer])
            for batch in gpt_batches(5, 8).to(device):
                optimizer.zero_grad()
                gpt_loss(model, batch).backward()
                if device.type == "cuda":
                    engine.before_optimizer_step(optimizer)
                optimizer.step()
                if device.type == "cuda":
                    engine.after_optimizer_step()
            states.append({name: value.cpu() for name, value in model.state_dict().items()})
        for name, weight in states[0].items():
            torch.testing.assert_close(states[1][name], weight, rtol=1e-3, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()
