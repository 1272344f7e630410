"""Gradients that are being reduced on a stream: bounded, kept until compute waits for it, and the same values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_osdp.backend.streams import ReductionMemory
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from tests.support.models import Block, hand_made_plan, modes_for, some_cluster, wrap_blocks

RANKS, WIDTH, LAYERS = 8, 32, 4

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    join(EmulatedLinks(some_cluster(RANKS, backend="emulated")))
    yield
    dist.destroy_process_group()


class Device:
    """Stands in for torch.cuda's events; notes which ones compute waits for. Nothing makes the host wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[int] = []
        self.recorded = 0
        device = self

        class Event:
            def record(self, stream: Any) -> None:
                assert stream is device
                self.number = device.recorded
                device.recorded += 1

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)

    def wait_event(self, event: Any) -> None:
        self.waited.append(event.number)


def gradient(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_reduction_memory_frees_the_oldest_only_as_far_as_its_bound_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    memory = ReductionMemory(device)
    for size in (40, 100, 70):
        memory.add_unit(size)
    assert memory.max_bytes == 70
    kept, waits = [], []
    for size in (30, 30, 20, 100, 40, 30):
        memory.before_reduction(size)
        waits.append(list(device.waited))
        tensor = gradient(size)
        kept.append(StorageWeakRef(tensor.untyped_storage()))
        memory.retain([tensor])
        del tensor
    assert waits == [[], [], [0], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]  # the largest is on its way by itself
    assert [one.expired() for one in kept] == [True] * 4 + [False] * 2
    memory.free_all()
    assert device.waited == [0, 1, 2, 3, 4, 5]
    assert all(one.expired() for one in kept)


def test_reduction_memory_on_a_cpu_keeps_nothing() -> None:
    memory, tensor = ReductionMemory(), gradient(8)
    kept = StorageWeakRef(tensor.untyped_storage())
    memory.retain([tensor])
    del tensor
    assert kept.expired()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.odd = nn.Linear(WIDTH, 5, bias=False)  # 160 elements, not of equal parts for 7 ranks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.odd(x)


def step(policy: str, reduce_dtype: str, device: Any) -> tuple[list[Tensor], int, int]:
    """Gradients, and the most bytes that were on their way, beside the bound."""
    torch.manual_seed(1)
    model, mode = Blocks(), policy.split()[-1]
    plan = hand_made_plan(modes_for(model, mode), RANKS).model_copy(update={"reduce_dtype": reduce_dtype})
    plan = wrap_blocks(plan, [f"blocks.{at}" for at in range(LAYERS)] if "joined" in policy else [])
    engine = FairScaleEngine(torch.device("cpu"), broadcast=False)
    engine.apply(model, plan)
    memory, most = engine._context.reducer.memory, [0]
    if device is not None:
        memory._stream = device
        retain = memory.retain

        def noting(tensors: Any) -> None:
            retain(tensors)
            most.append(memory._num_bytes)

        memory.retain = noting  # type: ignore[method-assign]
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        engine.before_forward()
        model(x).square().mean().backward()
        assert memory._num_bytes == 0  # a pass that is over has waited for all
        engine.finish_backward()
        engine.after_optimizer_step()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    engine.close()
    return gradients, max(most), memory.max_bytes


@pytest.mark.parametrize("reduce_dtype", ["", "bfloat16"])
@pytest.mark.parametrize("policy", ["zdp", "zdp2", "joined zdp", "joined zdp2"])
def test_gradients_on_their_way_never_exceed_the_bound_and_end_the_same(
    monkeypatch: pytest.MonkeyPatch, policy: str, reduce_dtype: str
) -> None:
    expected, *_ = step(policy, reduce_dtype, None)
    device = Device(monkeypatch)
    found, most, bound = step(policy, reduce_dtype, device)
    assert device.recorded > 0
    assert sorted(device.waited) == list(range(device.recorded))
    assert 0 < most <= bound
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
