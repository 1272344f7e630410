"""What the engine itself takes is measured on the real ranks, and counts in what a mode costs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.cluster import Cluster, EngineOverhead, ModeOverhead
from lightning_osdp.planning.cost import engine
from lightning_osdp.planning.operators import Operator, ParameterInfo
from lightning_osdp.sharding import overhead
from tests.models import some_cluster
from tests.ranks import run_ranks

OWN = EngineOverhead(
    dp=ModeOverhead(fixed_s=1e-3, s_per_byte=1e-9),
    zdp2=ModeOverhead(fixed_s=2e-3, s_per_byte=2e-9),
    zdp=ModeOverhead(fixed_s=3e-3, s_per_byte=3e-9),
)


def engine_s(operator: Operator, mode: Mode, cluster: Cluster, accumulation: int = 1) -> float:
    """In one optimizer step."""
    once, each = engine(operator, Choice((mode,)), cluster)
    return once + accumulation * each


def measure(rank: int, ranks: int) -> EngineOverhead:
    return overhead.measure(dist.group.WORLD, torch.device("cpu"))


def test_every_rank_gets_the_same_numbers_and_none_is_negative() -> None:
    first, second = run_ranks(measure, 2)
    assert first == second
    parts = [first.dp, first.zdp2, first.zdp]
    assert all(part.fixed_s >= 0 and part.s_per_byte >= 0 for part in parts)
    # A unit's hooks run some hundred lines of Python, whatever the machine.
    assert all(part.time_s(1 << 20) > 0 for part in parts[1:])


@pytest.mark.parametrize(
    ("mode", "expected_s"), [("dp", 1e-3 + 64e-6), ("zdp2", 2e-3 + 128e-6), ("zdp", 3e-3 + 192e-6)]
)
def test_it_is_added_for_each_operator_and_byte(mode: str, expected_s: float) -> None:
    weight = ParameterInfo(name="op.weight", shape=(125, 128))
    operator = Operator(name="op", kind="Linear", parameters=(weight,))
    assert engine_s(operator, Mode(mode), some_cluster(engine=OWN)) == pytest.approx(expected_s)
    assert engine_s(operator, Mode(mode), some_cluster()) == 0
    micro_batches = 3 if mode != "dp" else 1
    assert engine_s(operator, Mode(mode), some_cluster(engine=OWN), 3) == pytest.approx(micro_batches * expected_s)


def test_nothing_is_added_on_one_rank_and_no_copy_for_what_is_reduced_in_place() -> None:
    large = Operator(name="op", kind="Linear", parameters=(ParameterInfo(name="op.weight", shape=(1024, 1024)),))
    assert engine_s(large, Mode.ZDP, some_cluster(1, engine=OWN)) == 0
    assert engine_s(large, Mode.DP, some_cluster(engine=OWN)) == pytest.approx(1e-3)
