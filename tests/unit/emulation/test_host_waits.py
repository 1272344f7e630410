"""A step on CUDA has the host wait for nothing: forward, backward, clipping, scaling, update, under each plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp.emulation import EmulatedCluster
from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy import preemption
from lightning_osdp.strategy.osdp import OSDPStrategy
from tests.parity.test_low_precision import plan_of, with_casts
from tests.support import zoo
from tests.support.host_waits import noting_host_waits, pretend_cuda
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, some_cluster
from tests.support.plans import plan_for
from tests.support.split_plans import split_all, split_plan
from tests.support.tensor_plans import plan_of_candidates

RANKS, BATCH, WARM_UP = 4, 4, 3
BLOCKS = ("blocks.0", "blocks.1")
CPU = torch.device("cpu")
Plan = Callable[[nn.Module], ExecutionPlan]

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


@pytest.fixture
def world() -> Iterator[None]:
    join(EmulatedLinks(some_cluster(RANKS, backend="emulated")))
    yield
    dist.destroy_process_group()


def policy(name: str) -> Plan:
    def make(model: nn.Module) -> ExecutionPlan:
        plan = plan_of(model, name, is_prefetched=False)
        return plan.model_copy(update={"cluster": some_cluster(RANKS)})

    return make


PLANS: dict[str, Plan] = {
    name: policy(name)
    for name in ("zdp", "zdp2", "mixed", "joined zdp", "joined zdp2", "recomputed", "recomputed joined", "updated")
} | {
    "dp": lambda model: hand_made_plan(modes_for(model, "dp"), RANKS),
    "sliced": lambda model: split_plan(split_all(model, 3), RANKS),
}


def train_step(model: nn.Module, engine: FairScaleEngine, optimizer: Any, scaler: Any, batch: Tensor) -> None:
    """In two micro-batches, the first without averages, scaled and clipped unless gradients are used up in backward."""
    is_updated = engine.plan.update_in_backward
    for index, part in enumerate(batch.chunk(2) if not is_updated else [batch]):
        engine.before_forward()
        with engine.no_sync() if index == 0 and not is_updated else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16):
                loss = gpt_loss(model, part)
            (loss if is_updated else scaler.scale(loss)).backward()
            engine.finish_backward()
    if is_updated:
        engine.before_optimizer_step(optimizer)
        optimizer.step()
    else:
        scaler.unscale_(optimizer)
        engine.clip_grad_norm(model.parameters(), 0.5)
        engine.clip_grad_norm(model.parameters(), 0.5, float("inf"))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        engine.before_optimizer_step(optimizer)
        scaler.step(optimizer)
        scaler.update()
    engine.after_optimizer_step()
    optimizer.zero_grad()


@pytest.mark.parametrize("has_casts", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", PLANS)
def test_step_on_cuda_has_the_host_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch, world: None, name: str, has_casts: bool
) -> None:
    stream = pretend_cuda(monkeypatch)
    model = TinyGPT()
    plan = PLANS[name](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    engine = FairScaleEngine(CPU, broadcast=False)
    engine.apply(model, with_casts(plan, model) if has_casts else plan, [optimizer])
    scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD)
    batches = gpt_batches(WARM_UP + 1, BATCH)
    for batch in batches[:WARM_UP]:
        train_step(model, engine, optimizer, scaler, batch)
    with noting_host_waits() as found:
        train_step(model, engine, optimizer, scaler, batches[-1])
    engine.close()
    assert found == []
    assert stream.num_waits > 0 or name == "dp"


class Counting(TorchDispatchMode):
    """Counts aten calls by name: on CUDA each of them is a kernel, or a few for a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["dp", "zdp", "mixed"])
def test_norm_of_gradients_takes_one_call_for_those_that_are_sharded_and_one_for_the_others(
    world: None, name: str
) -> None:
    model, engine = TinyGPT(), FairScaleEngine(CPU, broadcast=False)
    engine.apply(model, PLANS[name](model))
    engine.before_forward()
    gpt_loss(model, gpt_batches(1, BATCH)[0]).backward()
    engine.finish_backward()
    with Counting() as counting:
        engine.clip_grad_norm(model.parameters(), 0.5)
    engine.close()
    norms = {call: count for call, count in counting.counts.items() if "norm" in call}
    assert norms == {"_foreach_norm": 1 if name == "dp" else 2}
    assert counting.counts["_foreach_mul_"] == 1


def test_tensor_parallel_step_on_cuda_has_the_host_wait_for_other_hosts_and_what_has_no_rows(
    monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    """How many rows other ranks have is told between hosts. Read from the device is what attentions get for all."""
    pretend_cuda(monkeypatch)
    module = zoo.llama(layers=1)
    batch = module.batch(BATCH)
    plan = plan_of_candidates(module, batch, RANKS, rest="zdp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    engine = FairScaleEngine(CPU, broadcast=False)
    engine.apply(module, plan, [optimizer])
    assert engine._tensor_units

    def step() -> None:
        engine.before_forward()
        module.training_step(batch, 0).backward()
        engine.before_optimizer_step(optimizer)
        engine.clip_grad_norm(module.parameters(), 0.5)
        optimizer.step()
        engine.after_optimizer_step()
        optimizer.zero_grad()

    step()
    with noting_host_waits() as found:
        step()
    engine.close()
    assert {place.partition(" at ")[2].partition(":")[0] for place in found} == {"scope.py"}


class Net(pl.LightningModule):
    """Logs in each step; has a mask, which no step writes, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGPT()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.ones(256, 256))

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        loss = gpt_loss(self.model, batch[0]) + self.norm(batch[0][:, :8].float()).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Noting(pl.Callback):
    """Notes waits after the first batches, loop and data included."""

    def __init__(self, num_first: int) -> None:
        self.num_first, self.context = num_first, noting_host_waits()
        self.found: list[str] = []

    def on_train_start(self, *_: Any) -> None:
        self.found = self.context.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index < self.num_first:
            self.found.clear()

    def on_train_end(self, *_: Any) -> None:
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize("mode", ["zdp", "mixed"])
def test_loop_on_cuda_has_the_host_wait_for_nothing(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Logging, accumulating, clipping, buffers, and the word to stop that ranks send before each batch."""
    rows = torch.cat([gpt_batches(1, BATCH)[0]] * 16)
    plan = plan_for(Net(), [rows[:BATCH]], RANKS, mode, BATCH, accumulation=2)
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(preemption, "is_driven_by_host", lambda _: False)
    noting = Noting(num_first=8)  # four forwards after reductions
    try:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=OSDPStrategy(plan=plan),
            plugins=[EmulatedCluster(resolve_cluster("a100-80gb-nvlink", RANKS))],
            callbacks=[noting],
            precision="bf16-mixed",
            gradient_clip_val=0.5,
            use_distributed_sampler=False,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), DataLoader(TensorDataset(rows), batch_size=BATCH))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert trainer.global_step == 8
    assert noting.found == []


@pytest.mark.parametrize(("kind", "delay"), [("cuda", 1), ("cpu", 0)])
def test_word_to_stop_is_heeded_before_the_next_batch_where_the_host_runs_ahead(
    world: None, kind: str, delay: int
) -> None:
    broadcast = preemption.StopBroadcast(torch.device(kind))
    words = [False, False, True, True]
    assert [broadcast.send(word) for word in words] == [False] * delay + words[: len(words) - delay]
