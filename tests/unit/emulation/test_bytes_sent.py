"""What a step sends and how often, counted in an emulated group, beside ``fully_shard`` on the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.cost.shards import shards_of
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from tests.parity.test_low_precision import with_casts
from tests.support.models import Block, hand_made_plan, modes_for, some_cluster, wrap_blocks
from tests.support.plans import plan_with
from tests.support.sent_bytes import count_sent
from tests.unit.profiling.tracing import test_weight_casts as casts

RANKS, LAYERS, WIDTH = 8, 3, 64
CPU = torch.device("cpu")


class Blocks(nn.Module):
    """Transformer blocks alone, whose weights are all read by products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of fully_shard


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    join(EmulatedLinks(some_cluster(RANKS, backend="emulated")))
    yield
    dist.destroy_process_group()


def step(model: nn.Module, engine: FairScaleEngine | None, width: int, is_autocast: bool = True) -> Counter[str]:
    """What the second step sends: the first makes buffers and learns the order."""
    x = torch.randn(2, 4, width)
    for _ in range(2):
        with count_sent() as found:
            if engine is not None:
                engine.before_forward()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                loss = model(x).float().square().mean()
            loss.backward()
            if engine is not None:
                engine.finish_backward()
                engine.after_optimizer_step()
        model.zero_grad()
    return found


def ours(mode: str, width: int = WIDTH, joined: bool = True, reduce_dtype: str = "") -> Counter[str]:
    model = Blocks(width)
    plan = with_casts(hand_made_plan(modes_for(model, mode), RANKS), model)
    plan = wrap_blocks(plan, [f"blocks.{i}" for i in range(LAYERS)] if joined else [])
    return run_plan(model, plan.model_copy(update={"reduce_dtype": reduce_dtype}), width)


def run_plan(model: nn.Module, plan: ExecutionPlan, width: int) -> Counter[str]:
    engine = FairScaleEngine(CPU, broadcast=False)
    engine.apply(model, plan)
    try:
        return step(model, engine, width)
    finally:
        engine.close()


def theirs(mode: str, width: int = WIDTH, reduce_dtype: torch.dtype = torch.float32) -> Counter[str]:
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=mode == "zdp")
    model = Blocks(width)
    for block in model.blocks:
        shard(block)
    shard(model)
    return step(model, None, width, is_autocast=False)


@pytest.mark.parametrize("joined", [True, False], ids=["per block", "per operator"])
@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_bytes_sent_are_at_most_those_of_fully_shard_with_reduction_in_fp32(mode: str, joined: bool) -> None:
    own, other = ours(mode, joined=joined), theirs(mode)
    assert 0 < own["bytes"] <= other["bytes"], (own, other)
    assert own["all_gather"] <= other["all_gather"]


@pytest.mark.parametrize("mode", ["dp", "zdp", "zdp2"])
def test_reduction_in_bf16_halves_what_reductions_send(mode: str) -> None:
    full, half = ours(mode), ours(mode, reduce_dtype="bfloat16")
    kind = "all_reduce" if mode == "dp" else "reduce_scatter"
    assert half[kind] == full[kind] / 2 > 0
    assert half["all_gather"] == full["all_gather"]


@pytest.mark.parametrize("width", [WIDTH, 640], ids=["small", "large"])
@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_collectives_per_block_are_at_most_one_more_than_those_of_fully_shard(mode: str, width: int) -> None:
    own, other = ours(mode, width), theirs(mode, width)
    calls = [sum(found[name] for name in found if name.startswith("calls")) for found in (own, other)]
    assert calls[0] <= calls[1] + LAYERS, (own, other)


class Reading(nn.Module):
    """Reads a layer in its own way."""

    def __init__(self, layer: nn.Module, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = layer, read

    def forward(self, rows: Tensor) -> Tensor:
        return self.read(self.layer, rows)


def square() -> nn.Linear:
    return nn.Linear(casts.WIDTH, casts.WIDTH, bias=False)


READS: dict[str, tuple[int, Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "product": (4, square, lambda x, rows: x(rows)),
    "cell": (3, lambda: nn.LSTMCell(casts.WIDTH, casts.WIDTH), lambda x, rows: x(rows)[0]),
    "rows": (2, casts.Looked, lambda x, rows: x(rows)),
    "cast by hand": (8, square, lambda x, rows: functional.linear(rows, x.weight.to(torch.bfloat16))),
    "given twice": (8, square, lambda x, rows: torch.linalg.multi_dot([rows.float(), x.weight, x.weight])),
    "view": (8, square, lambda x, rows: rows @ x.weight.t()),
    "index": (8, square, lambda x, rows: rows + x.weight[: len(rows)]),
    "sum": (8, square, lambda x, rows: rows + x.weight.sum(0)),
    "bag": (4, partial(casts.Looked, nn.EmbeddingBag), lambda x, rows: x(rows)),
}
"""Bytes gathered for an element in both passes, a layer, and how it is read.

Without a state, the backward of a cell reads one of its two weights; that of a table reads none."""


@pytest.mark.parametrize("name", READS)
def test_gathers_under_autocast_are_of_as_many_bytes_as_the_planner_counts(name: str) -> None:
    element_bytes, make, read = READS[name]
    module = casts.Net(Reading(make(), read))
    profile = casts.profile_of(module)
    choices = [ShardingChoice((Mode.DP if op.name == "first" else Mode.ZDP,)) for op in profile.operators]
    pairs = list(zip(profile.operators, choices, strict=True))
    operators = [OperatorPlan(name=op.name, slices=choice.slices, num_parameters=0) for op, choice in pairs]
    engine = FairScaleEngine(CPU, broadcast=False)
    engine.apply(module, plan_with(operators, profile, RANKS, casts.ROWS).with_types_of(profile))
    for _ in range(2):
        with count_sent() as found:
            engine.before_forward()
            with torch.autocast("cpu", torch.bfloat16):
                loss = module.training_step(torch.ones(casts.ROWS, casts.WIDTH))
            loss.backward()
            engine.finish_backward()
            engine.after_optimizer_step()
        module.zero_grad()
    engine.close()
    units = [unit for op, choice in pairs for unit in shards_of(op, choice).units]
    assert found["all_gather"] == sum(unit.gathered_bytes + unit.backward_bytes for unit in units)
    num_elements = sum(
        p.num_elements for op, choice in pairs if choice.slices != (Mode.DP,) for p in op.shardable_parameters
    )
    assert found["all_gather"] == element_bytes * num_elements
