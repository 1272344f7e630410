"""Collectives of an emulated group called as methods, and reductions of tensors that have none: as gloo does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.errors import ConfigurationError

RANKS = 4

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def world() -> Iterator[Any]:
    join(EmulatedLinks(resolve_cluster("h100-80gb-nvlink", RANKS)))
    yield dist.group.WORLD
    dist.destroy_process_group()


def zeros() -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(RANKS)]


FORMS: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "all-reduce": (lambda group, one, many: group.allreduce(one), [4.0, 4.0]),
    "largest": (lambda group, one, many: group.allreduce(one, dist.ReduceOp.MAX), [1.0, 1.0]),
    "largest of a list": (lambda group, one, many: group.allreduce([one], dist.ReduceOp.MAX), [1.0, 1.0]),
    "largest by name": (lambda group, one, many: group.allreduce([one], op=dist.ReduceOp.MAX), [1.0, 1.0]),
    "options": (lambda group, one, many: group.allreduce([one], dist.AllreduceOptions()), [4.0, 4.0]),
    "options by name": (lambda group, one, many: group.allreduce([one], opts=dist.AllreduceOptions()), [4.0, 4.0]),
    "broadcast": (lambda group, one, many: group.broadcast(one, 0), [1.0, 1.0]),
    "broadcast by name": (lambda group, one, many: group.broadcast(one, root=3), [1.0, 1.0]),
    "reduce": (lambda group, one, many: group.reduce(one, 0), [4.0, 4.0]),
    "gather": (lambda group, one, many: group.allgather(many, one), [1.0, 1.0]),
    "gather to one": (lambda group, one, many: group.gather(many, one, 0), [1.0, 1.0]),
    "scatter": (lambda group, one, many: group.scatter(one, many, 0), [0.0, 0.0]),
    "reduce-scatter": (lambda group, one, many: group.reduce_scatter(one, many), [0.0, 0.0]),
}


@pytest.mark.parametrize("name", FORMS)
def test_method_takes_a_single_tensor(world: Any, name: str) -> None:
    call, expected = FORMS[name]
    one, many = torch.ones(2), zeros()
    call(world, one, many).wait()
    assert one.tolist() == expected
    assert "gather" not in name or all(row.tolist() == [1.0, 1.0] for row in many)


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bitwise_reduction_is_one_of_integers(op: str) -> None:
    """As gloo: "Cannot use ReduceOp.BAND with non-integral dtype"."""
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigurationError, match=f"there is no {op} of tensors of {dtype}"):
            dist.all_reduce(torch.ones(2, dtype=dtype), getattr(dist.ReduceOp, op))
    for value in (torch.tensor([3, 4]), torch.tensor([True, False])):
        reduced = value.clone()
        dist.all_reduce(reduced, getattr(dist.ReduceOp, op))
        assert reduced.equal(torch.zeros_like(value) if op == "BXOR" else value)
    odd = torch.tensor([3])
    dist.all_reduce(odd, dist.ReduceOp.BXOR, group=dist.new_group([0, 1, 2]))
    assert odd.item() == 3


def test_mean_of_integers_is_theirs_and_of_booleans_there_is_none() -> None:
    numbers = torch.full((2,), 3)
    dist.all_reduce(numbers, dist.ReduceOp.AVG)
    assert numbers.tolist() == [3, 3], "Lightning asks for it where integers are logged with sync_dist"
    with pytest.raises(ConfigurationError, match=r"there is no mean of tensors of torch.bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
