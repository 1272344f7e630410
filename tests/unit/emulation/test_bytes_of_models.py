"""What a step of models of other families sends under bf16-mixed, beside ``fully_shard`` with the same units.

And what it allocates, beside what is predicted.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.wrapping import WrappedModel
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
    return {name: profile_of(build()) for name, build in FAMILIES.items()}


def profile_of(module: ZooModule) -> ModelProfile:
    """Of the step under autocast."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    return trace(module, module.batch(BATCH), BATCH, device=CPU, step_context=autocast).model_profile


def mode_of(mode: str, profile: ModelProfile, block: int | None) -> Mode:
    """``mixed``: a block of each mode in turn."""
    if mode != "mixed":
        return Mode(mode)
    return Mode.ZDP if block is None else list(Mode)[block % 3]


def run(module: ZooModule, engine: FairScaleEngine | None) -> None:
    if engine is not None:
        engine.before_forward()
    with torch.autocast("cpu", torch.bfloat16, enabled=engine is not None):
        loss = module.training_step(module.batch(BATCH), 0)
    loss.backward()
    if engine is not None:
        engine.finish_backward()
        engine.after_optimizer_step()


def step(module: ZooModule, engine: FairScaleEngine | None) -> Counter[str]:
    """What the second step sends: the first makes buffers and learns the order."""
    for _ in range(2):
        with count_sent() as found:
            run(module, engine)
        module.zero_grad()
    return found


def plan_of(profile: ModelProfile, mode: str, joined: bool) -> ExecutionPlan:
    block_of = {index: (at, block.name) for at, block in enumerate(profile.blocks) for index in block.operators}
    operators = []
    for index, operator in enumerate(profile.operators):
        at, block = block_of.get(index, (None, ""))
        own = mode_of(mode, profile, at) if operator.is_shardable else Mode.DP
        unit = block if joined and own != Mode.DP else ""
        operators.append(OperatorPlan(name=operator.name, slices=(own,), unit=unit, num_parameters=0))
    return plan_with(operators, profile, RANKS, BATCH).with_types_of(profile)


def ours(name: str, profile: ModelProfile, mode: str, joined: bool = True) -> Counter[str]:
    module = FAMILIES[name]()
    engine = FairScaleEngine(CPU, broadcast=False)
    engine.apply(module, plan_of(profile, mode, joined))
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


@pytest.mark.parametrize("joined", [True, False], ids=["per block", "per operator"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_step_sends_no_more_than_fully_shard(
    profiles: dict[str, ModelProfile], name: str, mode: str, joined: bool
) -> None:
    """But beside replicated gradients, 4 bytes for each say whether there is one."""
    profile = profiles[name]
    assert len(profile.blocks) == LAYERS
    own, other = ours(name, profile, mode, joined), theirs(name, profile, mode)
    flags = 4 * sum(len(op.parameters) for op in profile.operators) if mode == "dp" else 0
    assert 0 < own["bytes"] <= other["bytes"] + flags, (own, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_collectives_are_at_most_one_more_per_block_than_those_of_fully_shard(
    profiles: dict[str, ModelProfile], name: str, mode: str
) -> None:
    own, other = ours(name, profiles[name], mode), theirs(name, profiles[name], mode)
    in_blocks = {index for block in profiles[name].blocks for index in block.operators}
    outside = sum(op.is_shardable and index not in in_blocks for index, op in enumerate(profiles[name].operators))
    # What is in no block has its own unit, and one group together in fully_shard.
    assert own["calls"] <= other["calls"] + LAYERS + 3 * (outside - 1), (own, other)


def allocated_peak(function: Callable[[], None]) -> int:
    """Bytes that a function allocates on the CPU at most, more than it frees."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as made:
        function()
    events = [each for each in made.profiler.kineto_results.events() if each.name() == "[memory]"]
    return int(max(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))))


def predicted_and_allocated(
    module: ZooModule, mode: str, recomputed: bool = False, prefetch_max_bytes: int = 0, joined: bool = False
) -> tuple[float, int]:
    """Largest bytes of a step beyond parameters and states; of its tensors alone, without workspaces of kernels."""
    profile = profile_of(module)
    plan = plan_of(profile, mode, joined)
    names = tuple(block.name for block in profile.blocks) if recomputed else ()
    changes = {
        "reduce_scatter_copy_factor": 0.0,  # of what an emulated group makes no copies
        "reduce_scatter_buffer_bytes": 0,
        "prefetch_max_bytes": prefetch_max_bytes,
    }
    cluster = some_cluster(RANKS, backend="emulated").model_copy(update=changes)
    engine = FairScaleEngine(CPU, broadcast=False)
    engine.apply(module, plan.model_copy(update={"recomputed": names, "cluster": cluster}))
    try:
        run(module, engine)
        module.zero_grad()
        gc.collect()  # or what it frees amid the step would count as less
        allocated = allocated_peak(lambda: run(module, engine))
    finally:
        engine.close()
    wrapped = WrappedModel.from_assignment(profile, [operator.unit for operator in plan.operators])
    choices = wrapped.merge_choices([ShardingChoice(operator.slices) for operator in plan.operators])
    curves = Timeline(wrapped.model, cluster, 0).curves(choices, BATCH, recomputed=names)
    return sum(curve for name, curve in curves.items() if name != "states").max(), allocated


@pytest.mark.parametrize(
    ("family", "mode", "tolerance"),
    [
        (zoo.llama, "zdp2", 0.01),
        (zoo.llama, "dp", 0.03),
        (zoo.gpt2, "zdp2", 0.01),
        (zoo.gpt2, "zdp", 0.01),
        (zoo.gpt2, "dp", 0.01),
        (zoo.bert, "zdp", 0.01),
        (zoo.t5, "zdp", 0.01),
    ],
)
def test_step_of_a_model_with_a_large_table_allocates_what_is_predicted(
    family: Callable[..., ZooModule], mode: str, tolerance: float
) -> None:
    """The tables of all but LLaMA are tied to the head, and there while the module that has both computes its loss."""
    predicted, allocated = predicted_and_allocated(family(width=256, layers=2, vocabulary=8192, length=64), mode)
    assert allocated == pytest.approx(predicted, rel=tolerance)


@pytest.mark.parametrize(("family", "mode"), [(zoo.llama, "zdp"), (zoo.llama, "zdp2"), (zoo.gpt2, "zdp")])
def test_gradient_is_made_when_its_product_is_over_and_reduced_when_that_is_freed(
    family: Callable[..., ZooModule], mode: str
) -> None:
    predicted, allocated = predicted_and_allocated(family(width=256, layers=1, vocabulary=8192, length=8), mode)
    assert allocated == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(("family", "mode"), [(zoo.bert, "zdp2"), (zoo.t5, "zdp2"), (zoo.t5, "dp")])
def test_step_of_recomputed_blocks_allocates_what_is_predicted(family: Callable[..., ZooModule], mode: str) -> None:
    """Blocks that read nothing but casts of their input keep it for the recomputation alone."""
    sizes = {"width": 128, "layers": 6, "vocabulary": 2048, "length": 128}
    predicted, allocated = predicted_and_allocated(family(**sizes), mode, recomputed=True)
    assert allocated == pytest.approx(predicted, rel=0.02)


def test_block_is_prefetched_while_the_module_that_has_a_tied_table_computes_its_loss() -> None:
    module = zoo.gpt2(width=256, layers=2, vocabulary=4096, length=64)
    predicted, allocated = predicted_and_allocated(module, "zdp", prefetch_max_bytes=1 << 20)
    assert allocated == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_gradients_of_a_block_that_is_one_unit_come_one_after_the_other(mode: str) -> None:
    module = zoo.stack(widths=(512, 512), vocabulary=256, length=64)
    predicted, allocated = predicted_and_allocated(module, mode, joined=True)
    assert allocated == pytest.approx(predicted, rel=0.02)
