"""The parts of a unit that can be looked at without a process group."""

from __future__ import annotations

from contextlib import nullcontext
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.backend.streams import GatherMemory, create_streams
from lightning_osdp.engine.fairscale.context import EngineContext
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.fairscale.unit import FairScaleUnit
from lightning_osdp.engine.fairscale.unit_collectives import _pad
from lightning_osdp.engine.gradient_buckets import BucketedAllReduce, GradientSync
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, two_groups
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_plan


class Device:
    """A CUDA device: what is recorded and waited for on it, none of it by the host."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.recorded = 0

    def wait_event(self, event: Any) -> None:
        self.waited.append(event.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Stands in for torch.cuda's events, which have no way here to hold the host."""
    device = Device()

    class Event:
        def record(self, stream: Any) -> None:
            self.number = device.recorded
            device.recorded += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return device


def storages(count: int, size: int = 100) -> list[torch.UntypedStorage]:
    return [torch.UntypedStorage(size) for _ in range(count)]


def test_gather_memory_frees_a_unit_when_the_one_after_the_next_is_gathered(device: Device) -> None:
    memory, units = GatherMemory(device), storages(5)
    memory.max_bytes = 100
    waits = []
    for unit in units:  # gather, run, free, with the host far ahead of the device
        waits.append(list(device.waited))
        memory.free(unit)
    assert waits == [[], [], [0], [0, 1], [0, 1, 2]]
    assert [unit.nbytes() for unit in units] == [0, 0, 0, 0, 100]
    memory.free_all()
    assert [unit.nbytes() for unit in units] == [0] * 5
    assert device.waited == [0, 1, 2, 3, 4]


def test_gather_memory_bounds_bytes_and_not_numbers(device: Device) -> None:
    """A shared unit is freed parameter by parameter in the backward: all of them count together."""
    memory, small = GatherMemory(device), storages(8, 25)
    memory.max_bytes = 100
    for unit in small:
        memory.free(unit)
    assert [unit.nbytes() for unit in small] == [0] * 4 + [25] * 4


def test_gather_memory_gives_memory_back_that_is_gathered_again_before_it_was_freed(device: Device) -> None:
    memory, (unit,) = GatherMemory(device), storages(1)
    memory.max_bytes = 100
    memory.free(unit)
    memory.take_back(unit)
    assert (unit.nbytes(), device.waited) == (100, [0])
    memory.free_all()
    assert unit.nbytes() == 100


def test_gather_memory_bound_is_the_second_largest_unit(device: Device) -> None:
    memory, (small, large) = GatherMemory(device), (torch.UntypedStorage(size) for size in (25, 100))
    assert memory.max_bytes == 0
    for size in (25, 100, 40, 25):
        memory.add_unit(size)
    assert memory.max_bytes == 40
    memory.free(small)
    memory.free(large)
    assert (small.nbytes(), large.nbytes(), device.waited) == (0, 0, [0, 1])


def test_gather_memory_on_a_cpu_frees_at_once() -> None:
    (unit,) = storages(1)
    GatherMemory().free(unit)
    assert unit.nbytes() == 0


def test_streams_on_cuda_come_before_that_of_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: (device, priority))
    device = torch.device("cuda", 1)
    assert create_streams(device, ["gather", "reduce"], None) == dict.fromkeys(["gather", "reduce"], (device, -1))


@pytest.mark.parametrize(("device_type", "is_capturing"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_run_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch, device_type: str, is_capturing: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    guards = SimpleNamespace(thread=get_ident())
    context: Any = SimpleNamespace(
        why_no_runs="",
        params_summoned=False,
        device=torch.device(device_type),
        guards=guards,
        end_broken_passes=lambda: None,
    )
    is_refused = device_type == "cuda" and is_capturing
    with pytest.raises(ShardingError, match="can't be captured in a CUDA graph") if is_refused else nullcontext():
        EngineContext.check_run(context)


def test_flags_of_missing_gradients_are_made_without_a_copy_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    buckets = BucketedAllReduce(parameters, SimpleNamespace(size=lambda: 2), GradientSync(), lambda: None, lambda: None)
    buckets._rebuild_buckets()
    buckets._buckets[-1].present = {parameters[0], parameters[3]}
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (Tensor, "new_tensor"), (Tensor, "item")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("a copy"))
    flags = buckets._presence_flags(torch.zeros(2))
    assert flags.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_gradient_of_equal_parts_is_reduced_without_a_copy_and_others_are_padded() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert _pad(whole, 3).data_ptr() == whole.data_ptr()
    assert torch.equal(_pad(whole, 3), whole.flatten())
    assert torch.equal(_pad(whole, 5), torch.cat([whole.flatten(), torch.zeros(3)]))
    assert torch.equal(_pad(whole.t(), 4), whole.t().flatten())
    assert torch.equal(_pad(torch.ones(1), 4), torch.tensor([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", list(WEIGHT_MODES))
def test_engine_on_one_cuda_rank_trains_like_cpu(mode: Mode, tmp_path: Any) -> None:
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


def count_hook_calls(rank: int, ranks: int) -> list[int]:
    """How often the units' hooks run in each of a few steps."""
    calls = 0

    def counted(self: FairScaleUnit, *args: object) -> None:
        nonlocal calls
        calls += 1
        hook(self, *args)

    hook, FairScaleUnit._post_backward_hook = FairScaleUnit._post_backward_hook, counted
    model = TinyGPT()
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, hand_made_plan(modes_for(model, "zdp"), ranks), [])
    counts = []
    for batch in gpt_batches(4, 4):
        calls = 0
        engine.before_forward()
        loss = gpt_loss(model, batch)
        loss.backward()
        engine.finish_backward()
        counts.append(calls)
    return counts


def test_backward_hooks_run_equally_often_in_every_step() -> None:
    for counts in run_ranks(count_hook_calls, 2):
        assert len(set(counts)) == 1


class Adapted(nn.Module):
    """Frozen layers with small trained ones beside them, in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor, recompute: bool) -> Tensor:
        for pair in zip(self.frozen, self.adapters, strict=True):
            x = checkpoint(self.layer, x, *pair, use_reentrant=False) if recompute else self.layer(x, *pair)
        return x

    def layer(self, x: Tensor, frozen: nn.Module, adapter: nn.Module) -> Tensor:
        return torch.tanh(frozen(x) + adapter(x))


def train_frozen_units(rank: int, ranks: int, slices: int, recompute: bool) -> tuple[int, bool]:
    """How many units are whole at once in a step, and whether gradients are those of the plain module."""
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(rank))
    plain, ours = Adapted(), Adapted()
    plain(x, recompute).square().sum().backward()
    gradients = [parameter.grad for parameter in plain.adapters.parameters()]
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
    names = dict.fromkeys((f"frozen.{index}" for index in range(4)), ((Mode.ZDP,) * slices, 1 if slices > 1 else None))
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(ours, split_plan(names, ranks, ()))
    most, gather = 0, FairScaleUnit._gather

    def noted(self: FairScaleUnit, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        found = gather(self, *args, **kwargs)
        most = max(most, sum(unit.has_unsharded_params for unit in engine._units))
        return found

    FairScaleUnit._gather = noted
    engine.before_forward()
    ours(x, recompute).square().sum().backward()
    engine.finish_backward()
    most = max(most, sum(unit.has_unsharded_params for unit in engine._units) * 100)
    own = [parameter.grad for parameter in ours.adapters.parameters()]
    same = all(torch.allclose(one, other / ranks, atol=1e-6) for one, other in zip(own, gradients, strict=True))
    return most, same


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_frozen_units_are_unsharded_one_at_a_time_and_then_resharded(slices: int, recompute: bool) -> None:
    for most, same in run_ranks(train_frozen_units, 2, slices, recompute):
        assert most == 1
        assert same
