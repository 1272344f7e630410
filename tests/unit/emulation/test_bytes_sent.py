"""What a step sends and how often, counted in an emulated group, beside ``fully_shard`` on the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.parity.test_low_precision import with_casts
from tests.support.models import Block, hand_made_plan, modes_for, some_cluster, wrap_blocks
from tests.support.sent_bytes import count_sent

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
