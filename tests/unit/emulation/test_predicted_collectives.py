"""The collectives of a step last as long in an emulated cluster as the planner says: their number, bytes and links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.autotune import pipeline
from lightning_osdp.autotune.ranks import RankGroup, current_cluster, described_links
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.fairscale.unit_collectives import CoalescedAllGather
from lightning_osdp.planning.cost.trial_correction import predict_trial
from lightning_osdp.planning.spec.choices import Mode, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes, OperatorTime, SplitTime
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan
from tests.support.plans import plan_with

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")

CPU = torch.device("cpu")
WIDTH, BATCH_SIZE = 128, 2
BLOCKS = ("net.blocks.0", "net.blocks.1")
ONE_NODE, TWO_NODES, ODD = ("a100-80gb-nvlink", 8), ("2xa100-80gb-nvlink+10gbit", 16), ("3xa100-80gb-nvlink+10gbit", 15)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = TinyGPT(width=WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return gpt_loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@dataclass(frozen=True)
class Case:
    """How all operators are kept."""

    mode: str = "zdp"
    where: tuple[str, int] = ONE_NODE
    scope: ShardingScope = ShardingScope.WORLD
    hierarchical: bool = False
    joined: bool = False
    recomputed: bool = False
    slices: int = 1
    prefetch: int = 0


CASES = {
    "dp": Case("dp"),
    "zdp2": Case("zdp2"),
    "zdp": Case(),
    "zdp, prefetched": Case(prefetch=1 << 30),
    "zdp per block": Case(joined=True),
    "zdp per block, recomputed": Case(joined=True, recomputed=True),
    "zdp, recomputed": Case(recomputed=True),
    "zdp2, recomputed": Case("zdp2", recomputed=True),
    "zdp in slices": Case(slices=4),
    "dp over nodes": Case("dp", TWO_NODES),
    "zdp over nodes": Case(where=TWO_NODES),
    "zdp over nodes in two stages": Case(where=TWO_NODES, hierarchical=True),
    "zdp2 over nodes in two stages": Case("zdp2", TWO_NODES, hierarchical=True),
    "zdp inside nodes": Case(where=TWO_NODES, scope=ShardingScope.NODE),
    "zdp2 inside nodes per block": Case("zdp2", TWO_NODES, ShardingScope.NODE, joined=True),
    "zdp, nodes of five": Case(where=ODD),
    "zdp inside nodes of five": Case(where=ODD, scope=ShardingScope.NODE),
}


FREE = {"latencies": "s_per_byte", "bytes": "latency_s"}
"""By what takes time on a link: what takes none."""


def without(name: str, value: Any) -> Any:
    """The same values with 0 for all of that name."""
    if isinstance(value, FrozenModel):
        fields = {key: 0.0 if key == name else without(name, getattr(value, key)) for key in type(value).model_fields}
        return value.model_copy(update=fields)
    return value


@contextmanager
def emulated(where: tuple[str, int], counted: str) -> Iterator[Cluster]:
    """The cluster as a start plans with it, whose collectives take time for one thing alone."""
    join(EmulatedLinks(without(FREE[counted], resolve_cluster(*where))))
    try:
        ranks = RankGroup.from_node_rank(dist.group.WORLD, 0, CPU)
        known = described_links(ranks)
        yield current_cluster(ranks, known.link, known.hierarchical_links)
    finally:
        dist.destroy_process_group()


@contextmanager
def recorded() -> Iterator[list[tuple[str, int, int, float]]]:
    """Kind, bytes, number of ranks and seconds of each collective, none of which takes any time."""
    found: list[tuple[str, int, int, float]] = []
    original = EmulatedLinks.seconds

    def seconds(links: EmulatedLinks, kind: Any, num_bytes: int, ranks: Any, tensors: int = 1) -> float:
        found.append((kind, num_bytes, len(ranks), original(links, kind, num_bytes, ranks, tensors)))
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedLinks, "seconds", seconds)
        yield found


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return pipeline.profile_model(TrialContext(Module(), batch(), BATCH_SIZE, CPU)).model_profile


def batch() -> Tensor:
    return gpt_batches(1, BATCH_SIZE)[0]


def plan_of(case: Case, model: ModelProfile) -> ExecutionPlan:
    operators = []
    for operator in model.operators:
        mode = Mode(case.mode) if operator.is_shardable else Mode.DP
        is_sharded, block = mode != Mode.DP, next((b for b in BLOCKS if operator.name.startswith(f"{b}.")), "")
        count = case.slices if is_sharded and operator.split_dims else 1
        operators.append(
            OperatorPlan(
                name=operator.name,
                slices=(mode,) * count,
                split_dim=operator.split_dims[0] if count > 1 else None,
                sharding_group=case.scope if is_sharded else ShardingScope.WORLD,
                hierarchical=case.hierarchical and is_sharded,
                unit=block if case.joined and is_sharded else "",
                is_recomputed=case.recomputed and bool(block),
                num_parameters=operator.num_parameters,
                gathers_in_backward=any(parameter.read_in_backward for parameter in operator.parameters),
            )
        )
    plan = plan_with(operators, model, case.where[1], BATCH_SIZE)
    return plan.model_copy(update={"recomputed": BLOCKS if case.recomputed else ()})


def predicted_s(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan) -> float:
    """Seconds of all collectives of a step in which nothing hides them: no compute, and no others."""
    line = LinearInBatch()
    times = tuple(
        OperatorTime(
            splits=tuple(
                SplitTime(dim=dim, slices=count, forward=line, backward=line)
                for dim in operator.split_dims
                for count in (2, 4)
            )
        )
        for operator in model.operators
    )
    compute = ComputeTimes(operators=times, unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    return predict_trial(model, compute, cluster.with_overlap(0.0), plan, BATCH_SIZE).predicted_s


def emulated_step(plan: ExecutionPlan) -> list[tuple[str, int, int, float]]:
    """The collectives of the second step: the first makes buffers and learns the order."""
    module = Module()
    engine = FairScaleEngine(CPU, broadcast=False)
    with recorded() as found:
        engine.apply(module, plan)
        for _ in range(2):
            found.clear()
            engine.before_forward()
            module.training_step(batch(), 0).backward()
            engine.finish_backward()
            engine.after_optimizer_step()
            module.zero_grad()
        step = list(found)
        engine.close()
    return step


def compare(own: list[tuple[str, int, int, float]], expected_s: float, cluster: Cluster, rel: float = 0.02) -> None:
    """The last bucket has a latency that the planner spreads over as many bytes as go into a bucket: it counts some."""
    bucket_s = cluster.link.all_reduce.time_s(0, cluster.ranks)
    found_s = sum(seconds for *_, seconds in own)
    missing_s = min(bucket_s, max(0.0, found_s - expected_s))
    assert found_s - missing_s == pytest.approx(expected_s, rel=rel, abs=0.1 * bucket_s), own


@pytest.mark.parametrize("counted", FREE)
@pytest.mark.parametrize("name", CASES)
def test_collectives_of_a_step_last_as_long_as_the_planner_says(name: str, counted: str, profile: ModelProfile) -> None:
    case = CASES[name]
    plan = plan_of(case, profile)
    with emulated(case.where, counted) as cluster:
        cluster = cluster.model_copy(update={"prefetch_max_bytes": case.prefetch})
        plan = plan.model_copy(update={"cluster": cluster})
        own = emulated_step(plan)
        # What a block runs last is not gathered again for its backward, if its forward was just repeated.
        is_repeated = case.recomputed and case.mode == "zdp" and not case.joined
        # A gather between nodes has half of the start of an all-reduce, of which alone the latency is known.
        rel = 0.1 if is_repeated else 0.06 if case.hierarchical and counted == "latencies" else 0.02
        compare(own, predicted_s(profile, cluster, plan), cluster, rel)


def test_units_are_prefetched_by_a_rank_without_others(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    case, original = CASES["zdp, prefetched"], CoalescedAllGather.gather
    are_started: list[bool] = []

    def gather(group: CoalescedAllGather, *tensors: Any) -> None:
        are_started.append(group.is_started)
        original(group, *tensors)

    monkeypatch.setattr(CoalescedAllGather, "gather", gather)
    with emulated(case.where, "bytes") as cluster:
        cluster = cluster.model_copy(update={"prefetch_max_bytes": case.prefetch})
        emulated_step(plan_of(case, profile).model_copy(update={"cluster": cluster}))
    second_step = are_started[len(are_started) // 2 :]
    assert second_step.count(False) == 2  # the first gather of the forward and of the backward
    assert second_step.count(True) > 4


@pytest.fixture(scope="module")
def tensor_profile() -> ModelProfile:
    context = TrialContext(Module(), batch(), BATCH_SIZE, CPU, tensor_degrees=(2, 4, 8))
    return pipeline.profile_model(context).model_profile


def tensor_plan(model: ModelProfile, degree: int, ranks: int) -> ExecutionPlan:
    """All that may be cut over ``degree`` ranks is, the rest is replicated."""
    splits, scopes = {}, {}
    for candidate in model.tensor_candidates:
        splits |= {name: candidate.split(index, degree) for index, name in enumerate(candidate.operators)}
        if candidate.scope is not None:
            scopes[candidate.scope] = candidate.tensor_scope
    operators = tuple(
        OperatorPlan(
            name=operator.name,
            slices=(Mode.TP if operator.name in splits else Mode.DP,),
            tensor=splits.get(operator.name),
            num_parameters=operator.num_parameters,
        )
        for operator in model.operators
    )
    assert splits
    made = dict(hand_made_plan({}, ranks, batch_size=BATCH_SIZE, fingerprint=model.fingerprint))
    return ExecutionPlan.model_validate(made | {"operators": operators, "tensor_scopes": scopes})


@pytest.mark.parametrize("counted", FREE)
@pytest.mark.parametrize(("where", "degree"), [(ONE_NODE, 2), (ONE_NODE, 4), (TWO_NODES, 4), (TWO_NODES, 8)])
def test_exchanges_of_tensor_parallel_operators_last_as_long_as_the_planner_says(
    where: tuple[str, int], degree: int, counted: str, tensor_profile: ModelProfile
) -> None:
    with emulated(where, counted) as cluster:
        plan = tensor_plan(tensor_profile, degree, cluster.ranks).model_copy(update={"cluster": cluster})
        own = emulated_step(plan)
        compare(
            own, predicted_s(tensor_profile, cluster, plan), cluster, rel=0.05
        )  # and what tells which gradients there are
