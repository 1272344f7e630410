"""Engines are found by name, and the search offers what they can carry out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_osdp.engine import base
from lightning_osdp.engine.base import create_engine, engine_capabilities, engines_of, find_engine, register_engine
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode, ShardingScope, enumerate_choices
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import Operator, ParameterInfo
from tests.support.models import some_cluster, uniform_hierarchical_links
from tests.support.replicated_engine import ReplicatedEngine

CPU = torch.device("cpu")
LINEAR = Operator(
    name="linear", kind="Linear", parameters=(ParameterInfo(name="weight", shape=(2048, 2048)),), split_dims=(1, 0)
)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTERED_ENGINES", {})


def test_find_engine_returns_fairscale_and_registered_engines() -> None:
    register_engine("replicated", ReplicatedEngine)
    assert find_engine("fairscale") is FairScaleEngine
    assert find_engine("replicated") is ReplicatedEngine


def test_create_engine_with_unknown_name_lists_names() -> None:
    register_engine("replicated", ReplicatedEngine)
    with pytest.raises(ConfigurationError, match=r"engine='deepspeed' is not known; there are: fairscale, replicated"):
        create_engine("deepspeed", CPU)


class Listed(nn.ModuleList):
    """Holds parameters of its own, and is false: it has no modules."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def test_engines_of_module_come_in_order_of_creation_whatever_their_modules_are() -> None:
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    engines = [ReplicatedEngine(CPU) for _ in range(40)]
    assert engines_of(own) == []
    for index, engine in enumerate(engines):
        engine._module = [own, other, Listed(own.weight), nn.Sequential(own, other)][index % 4]
    engines[3].is_restored = True
    assert engines_of(own) == [engine for index, engine in enumerate(engines) if index % 4 != 1 and index != 3]


def test_fairscale_can_do_everything_but_prefetches_on_cpu_only() -> None:
    assert engine_capabilities("fairscale", CPU) == ALL_CAPABILITIES
    assert not engine_capabilities("fairscale", torch.device("cuda")).prefetch


def test_choices_of_engine_without_sharding_are_replicated_only() -> None:
    capabilities = ReplicatedEngine.capabilities(CPU)
    choices = enumerate_choices(LINEAR, engine_modes=capabilities.modes, mixed_slices=capabilities.mixed_slices)
    assert [choice.slices for choice in choices] == [(Mode.DP,)]


def test_choices_without_mixed_slices_have_one_mode_each() -> None:
    choices = enumerate_choices(LINEAR, mixed_slices=False)
    assert {len(set(choice.slices)) for choice in choices} == {1}
    assert {len(choice.slices) for choice in choices} > {1, 2}


def test_constraints_of_engine_without_slices_allow_full_operators_only() -> None:
    constraints = SearchConstraints(slice_granularity=4, capabilities=EngineCapabilities(slices=False))
    assert constraints.allowed_slices("linear") == (1,)


@pytest.mark.parametrize(
    ("capabilities", "scopes"),
    [
        (
            EngineCapabilities(),
            {(ShardingScope.WORLD, False), (ShardingScope.WORLD, True), (ShardingScope.NODE, False)},
        ),
        (EngineCapabilities(hierarchical=False), {(ShardingScope.WORLD, False), (ShardingScope.NODE, False)}),
        (EngineCapabilities(hierarchical=False, node_scope=False), {(ShardingScope.WORLD, False)}),
    ],
)
def test_constraints_offer_scopes_of_engine(capabilities: EngineCapabilities, scopes: set[object]) -> None:
    plain = some_cluster(2)
    levels = uniform_hierarchical_links(plain.link)
    cluster = some_cluster(2, nodes=2, hierarchical_links=levels)
    assert set(SearchConstraints(capabilities=capabilities).allowed_scopes(cluster)) == scopes
