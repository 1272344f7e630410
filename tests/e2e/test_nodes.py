"""Whole runs on two nodes of two ranks, as torchrun's environment tells them apart."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_osdp import OSDPCallback, OSDPStrategy
from lightning_osdp.errors import ConfigurationError, OSDPWarning, PlanMismatchError
from lightning_osdp.planning.spec.choices import Mode, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, HierarchicalLinks, Link, ShardingLink
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.modules import GPTModule, trainer
from tests.support.ranks import run_ranks

RANKS = 4


class Uneven(TorchElasticEnvironment):
    """Three ranks on one node and one on another. torchrun refuses that under Lightning, other launchers do not."""

    def node_rank(self) -> int:
        return int(self.global_rank() == 3)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """All of them are accepted."""


def cluster() -> Cluster:
    """Links between nodes are slow, all-reduces over all ranks slower than one between nodes."""
    slow, fast = (CollectiveFit(latency_s=1e-4, s_per_byte=rate) for rate in (1e-7, 1e-9))
    world = Link(all_reduce=slow, all_gather=slow, reduce_scatter=slow)
    inside, two_stage = (ShardingLink(all_gather=one, reduce_scatter=one) for one in (fast, slow))
    levels = HierarchicalLinks(intra_node=inside, inter_node=slow, hierarchical=two_stage)
    return Cluster(nodes=2, devices_per_node=2, device="cpu", backend="gloo", link=world, hierarchical_links=levels)


def set_two_node_environment(rank: int) -> None:
    os.environ.update(GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")


def fit(folder: str, strategy: OSDPStrategy, **options: Any) -> tuple[Any, GPTModule]:
    torch.manual_seed(1)
    module = GPTModule(own_rows=True)
    made = trainer(folder, strategy, **({"num_nodes": 2, "devices": 2, "max_steps": 3} | options))
    made.fit(module)
    return made, module


def fit_on_two_nodes(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    set_two_node_environment(rank)
    strategy = OSDPStrategy(cache="", trial_steps=False, batch_size=4, cluster=cluster(), sharding_group="node")
    node, module = fit(folder, strategy, callbacks=[OSDPCallback(modes="zdp")])
    plan = node.strategy.execution_plan
    sampler = node.strategy.distributed_sampler_kwargs
    state = node.strategy.lightning_module_state_dict()
    operators = tuple(op.model_copy(update={"slices": (Mode.DP,), "unit": ""}) for op in plan.operators)
    replicated = plan.model_copy(update={"operators": operators})
    _, plain = fit(folder, OSDPStrategy(plan=replicated))
    return {
        "plan": plan.to_json(),
        "sampler": sampler,
        "losses": module.losses,
        "plain_losses": plain.losses,
        "names": list(state),
        "refused": collect_refusals(rank, folder, plan),
    }


def collect_refusals(rank: int, folder: str, plan: ExecutionPlan) -> dict[str, Any]:
    """What can't be had on ranks that are spread unevenly; and what is said about it."""
    os.environ.update(GROUP_RANK="0", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="4")
    uneven = {"num_nodes": 1, "devices": 4, "plugins": [Uneven()], "max_steps": 1}
    said: dict[str, Any] = {}
    flat = cluster().model_copy(
        update={"nodes": 1, "devices_per_node": 4, "hierarchical_links": None, "devices_by_node": (3, 1)}
    )
    wanted: dict[str, tuple[type[Exception], dict[str, Any]]] = {
        "wish": (ConfigurationError, {"cluster": flat, "sharding_group": "node"}),
        "plan": (PlanMismatchError, {"plan": plan}),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OSDPWarning)
        for name, (error, settings) in wanted.items():
            with pytest.raises(error) as found:
                fit(folder, OSDPStrategy(cache="", trial_steps=False, batch_size=4, **settings), **uneven)
            said[name] = str(found.value)
    said["warnings"] = [str(one.message) for one in caught if issubclass(one.category, OSDPWarning)]
    return said


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fit_on_two_nodes, RANKS, str(tmp_path_factory.mktemp("nodes")))


def test_node_sharding_group_trains_like_replicated_plan(results: list[dict[str, Any]]) -> None:
    plan = ExecutionPlan.from_json(results[0]["plan"])
    assert any(op.slices != (Mode.DP,) for op in plan.operators)
    assert {op.sharding_group for op in plan.operators if op.slices != (Mode.DP,)} == {ShardingScope.NODE}
    for result in results:
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(result["plain_losses"]), rtol=1e-4, atol=0
        )
    assert results[0]["names"] == list(GPTModule().state_dict())


def test_distributed_sampler_on_two_nodes_gives_each_rank_its_own_part(results: list[dict[str, Any]]) -> None:
    assert [result["sampler"] for result in results] == [{"num_replicas": 4, "rank": rank} for rank in range(4)]


def test_uneven_nodes_warn_on_rank_zero_and_reject_node_sharding(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert "nodes have 3, 1 devices" in result["refused"]["wish"]
        assert "inside 2 nodes, this run has 1" in result["refused"]["plan"]
        told = [text for text in result["refused"]["warnings"] if "spread over nodes as 3, 1" in text]
        assert bool(told) == (rank == 0)
