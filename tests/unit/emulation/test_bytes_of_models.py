"""What a step of models of other families sends under bf16-mixed, beside ``fully_shard`` with the same units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import OperatorPlan
from tests.support import zoo
from tests.support.models import some_cluster
from tests.support.plans import plan_with
from tests.support.sent_bytes import count_sent
from tests.support.traced_models import trace
from tests.support.zoo import ZooModule

RANKS, BATCH, LAYERS = 8, 2, 3
CPU = torch.device("cpu")
FAMILIES: dict[str, Callable[[], ZooModule]] = {
    "gpt2": partial(zoo.gpt2, layers=LAYERS),
    "llama": partial(zoo.llama, layers=LAYERS),
    "vit": partial(zoo.vit, layers=LAYERS),
    "bert": partial(zoo.bert, layers=LAYERS),
}
MODES = ("zdp", "zdp2", "mixed", "dp")

pytestmark = [  # warnings of fully_shard
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    join(EmulatedLinks(some_cluster(RANKS, backend="emulated")))
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def profiles() -> dict[str, ModelProfile]:
    """Of the step under autocast."""
    autocast, found = partial(torch.autocast, "cpu", torch.bfloat16), {}
    for name, build in FAMILIES.items():
        module = build()
        found[name] = trace(module, module.batch(BATCH), BATCH, device=CPU, step_context=autocast).model_profile
    return found


def mode_of(mode: str, profile: ModelProfile, block: int | None) -> Mode:
    """``mixed``: a block of each mode in turn."""
    if mode != "mixed":
        return Mode(mode)
    return Mode.ZDP if block is None else list(Mode)[block % 3]


def step(module: ZooModule, engine: FairScaleEngine | None) -> Counter[str]:
    """What the second step sends: the first makes buffers and learns the order."""
    for _ in range(2):
        with count_sent() as found:
            if engine is not None:
                engine.before_forward()
            with torch.autocast("cpu", torch.bfloat16, enabled=engine is not None):
                loss = module.training_step(module.batch(BATCH), 0)
            loss.backward()
            if engine is not None:
                engine.finish_backward()
                engine.after_optimizer_step()
        module.zero_grad()
    return found


def ours(name: str, profile: ModelProfile, mode: str, joined: bool = True) -> Counter[str]:
    module = FAMILIES[name]()
    block_of = {index: (at, block.name) for at, block in enumerate(profile.blocks) for index in block.operators}
    operators = []
    for index, operator in enumerate(profile.operators):
        at, block = block_of.get(index, (None, ""))
        own = mode_of(mode, profile, at) if operator.is_shardable else Mode.DP
        unit = block if joined and own != Mode.DP else ""
        operators.append(OperatorPlan(name=operator.name, slices=(own,), unit=unit, num_parameters=0))
    plan = plan_with(operators, profile, RANKS, BATCH).with_types_of(profile)
    engine = FairScaleEngine(CPU, broadcast=False)
    engine.apply(module, plan)
    try:
        return step(module, engine)
    finally:
        engine.close()


def theirs(name: str, profile: ModelProfile, mode: str) -> Counter[str]:
    module, policy = FAMILIES[name](), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = init_device_mesh("cpu", (RANKS,))
    replicated = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    shard: Any = partial(fully_shard, mp_policy=policy)
    for at, block in enumerate(profile.blocks):
        own = mode_of(mode, profile, at)
        mesh = replicated if own == Mode.DP else sharded
        shard(module.get_submodule(block.name), mesh=mesh, reshard_after_forward=own == Mode.ZDP)
    root = mode_of(mode, profile, None)
    shard(module.net, mesh=replicated if root == Mode.DP else sharded, reshard_after_forward=root == Mode.ZDP)
    return step(module, None)


def bytes_read_as_is(profile: ModelProfile) -> int:
    """Bytes by which the gather of a forward is larger of what autocast reads in float32, such as tables."""
    parameters = [p for op in profile.operators if op.is_shardable for p in op.shardable_parameters]
    return sum(2 * p.num_elements for p in parameters if not p.cast_element_bytes)


@pytest.mark.parametrize("joined", [True, False], ids=["per block", "per operator"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_step_sends_no_more_than_fully_shard_but_for_one_gather_of_tables_in_zdp2(
    profiles: dict[str, ModelProfile], name: str, mode: str, joined: bool
) -> None:
    """A table in float32, gathered once, is as many bytes as one in bf16 that is gathered for the backward as well.

    Beside replicated gradients, 4 bytes for each say whether there is one.
    """
    profile = profiles[name]
    assert len(profile.blocks) == LAYERS
    own, other = ours(name, profile, mode, joined), theirs(name, profile, mode)
    tables = bytes_read_as_is(profile) if mode == "zdp2" else 0
    flags = 4 * sum(len(op.parameters) for op in profile.operators) if mode == "dp" else 0
    assert 0 < own["bytes"] <= other["bytes"] + tables + flags, (own, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_collectives_are_at_most_one_more_per_block_than_those_of_fully_shard(
    profiles: dict[str, ModelProfile], name: str, mode: str
) -> None:
    own, other = ours(name, profiles[name], mode), theirs(name, profiles[name], mode)
    calls = [sum(found[each] for each in found if each.startswith("calls")) for found in (own, other)]
    in_blocks = {index for block in profiles[name].blocks for index in block.operators}
    outside = sum(op.is_shardable and index not in in_blocks for index, op in enumerate(profiles[name].operators))
    assert calls[0] <= calls[1] + LAYERS + 3 * outside, (own, other)  # what is in no block has its own unit
