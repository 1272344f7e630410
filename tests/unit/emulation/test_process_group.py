"""Collectives of an emulated group: their results are copies of this rank's data, and they take the links' time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_osdp.backend import agree, collectives
from lightning_osdp.backend.hierarchical import HierarchicalCommunicator, NodeGroups, detect_node_layout
from lightning_osdp.emulation.environment import EmulatedCluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, HierarchicalLinks, Link, ShardingLink

# torch 2.13 calls what users know as all_gather_into_tensor and reduce_scatter_tensor by other names.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

RANKS, NODES = 16, 2
CPU = torch.device("cpu")
SLOW = CollectiveFit(latency_s=0.05 / (RANKS - 1), s_per_byte=0.0)
NONE = CollectiveFit(latency_s=0.0, s_per_byte=0.0)


def cluster(fit: CollectiveFit = NONE) -> Cluster:
    inside = ShardingLink(all_gather=NONE, reduce_scatter=NONE)
    return Cluster(
        nodes=NODES,
        devices_per_node=RANKS // NODES,
        device="cpu",
        backend="emulated",
        link=Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit),
        hierarchical_links=HierarchicalLinks(intra_node=inside, inter_node=NONE, hierarchical=inside),
    )


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    join(EmulatedLinks(cluster(getattr(request, "param", NONE))))
    yield dist.group.WORLD
    dist.destroy_process_group()


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def test_all_reduce_reduces_n_equal_values(world: Any) -> None:
    for op, expected in ((dist.ReduceOp.SUM, 16.0), (dist.ReduceOp.MAX, 1.0), (dist.ReduceOp.AVG, 1.0)):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [expected] * 3


def test_product_and_unknown_reductions(world: Any) -> None:
    tensor = torch.full((2,), 2.0)
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    assert tensor.tolist() == [2.0**RANKS] * 2
    with pytest.raises(ConfigurationError, match="PREMUL_SUM"):
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]


def test_gathers_hold_a_copy_for_each_rank(world: Any) -> None:
    outputs = [torch.zeros(2) for _ in range(RANKS)]
    dist.all_gather(outputs, numbers(2))
    assert torch.stack(outputs).equal(numbers(2).expand(RANKS, 2))
    flat = torch.zeros(2 * RANKS)
    collectives.all_gather(flat, numbers(2), world)
    assert flat.equal(numbers(2).repeat(RANKS))
    flat[:2] = 7.0
    collectives.all_gather(flat, flat[:2], world)  # the shard lies in its own output
    assert flat.equal(torch.full((2 * RANKS,), 7.0))


@pytest.mark.parametrize("is_async", [False, True])
def test_collectives_of_the_engine_give_this_ranks_part(world: Any, is_async: bool) -> None:
    full, outputs = [numbers(RANKS * 3), numbers(RANKS)], [torch.zeros(3), torch.zeros(1)]
    gathered = [torch.zeros(RANKS * 3), torch.zeros(RANKS)]
    if is_async:
        collectives.reduce_scatter_async(outputs, full, world).wait()
        collectives.all_gather_async(gathered, outputs, world).wait()
    else:
        collectives.reduce_scatter_coalesced(outputs, full, world)
        collectives.all_gather_coalesced(gathered, outputs, world)
    assert outputs[0].equal(RANKS * numbers(3))
    assert gathered[0].equal((RANKS * numbers(3)).repeat(RANKS))


def test_objects_numbers_and_errors_are_agreed_without_others(world: Any) -> None:
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, {"a": 1})
    assert everyone == [{"a": 1}] * RANKS
    assert agree.broadcast_object(world, "plan") == "plan"
    assert agree.all_reduce_max([3.0, -2.0], world, CPU) == [3.0, -2.0]
    with pytest.raises(ZeroDivisionError):  # at once: nobody has to be told
        agree.raise_on_all_ranks(world, lambda: 1 // 0)


def test_scatter_all_to_all_and_messages(world: Any) -> None:
    part = torch.zeros(2)
    dist.scatter(part, [torch.full((2,), float(rank)) for rank in range(RANKS)], src=0)
    assert part.tolist() == [0.0, 0.0]
    output = torch.zeros(RANKS)
    dist.all_to_all_single(output, numbers(RANKS))
    assert output.tolist() == [1.0] * RANKS
    received = torch.zeros(2)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers(2), 1), dist.P2POp(dist.irecv, received, 1)])
    for work in works:
        work.wait()
    assert received.equal(numbers(2))
    dist.barrier()


def test_what_another_rank_would_have_to_say_is_an_error(world: Any) -> None:
    with pytest.raises(ConfigurationError, match="a broadcast from rank 3 is not emulated"):
        dist.broadcast_object_list([None], src=3)
    with pytest.raises(ConfigurationError, match="stands for all 16 ranks"):
        dist.distributed_c10d._get_default_store().get("written by rank 1")


REFUSED = {
    "a rank that is not there receives": (lambda: dist.send(torch.ones(2), 99), "there is no rank 99 in a group of 16"),
    "a rank that is not there sends": (lambda: dist.recv(torch.ones(2), 99), "there is no rank 99 in a group of 16"),
    "a root that is not there": (lambda: dist.broadcast(torch.ones(2), 99), "there is no rank 99 in a group of 16"),
    "a root of reduce that is not there": (lambda: dist.reduce(torch.ones(2), 99), "there is no rank 99 in a group"),
    "a length from another rank": (
        lambda: dist.recv(torch.ones(1, dtype=torch.int64), 3),
        "message from rank 3 is not",
    ),
    "objects from another rank": (lambda: dist.recv_object_list([None], 3), "a message from rank 3 is not emulated"),
    "objects scattered by another": (
        lambda: dist.scatter_object_list([None], None, 5),
        "a broadcast from rank 5 is not emulated",
    ),
    "a short list": (
        lambda: dist.all_gather([torch.zeros(2)] * 3, torch.ones(2)),
        "all_gather over 16 ranks: its list has 3 tensors",
    ),
    "an output of other sizes": (
        lambda: dist.all_gather_into_tensor(torch.zeros(RANKS * 3), torch.ones(1)),
        "all_gather over 16 ranks: the tensor of all ranks has 48 elements of torch.float32, that of one rank 1 of",
    ),
    "an output of another type": (
        lambda: dist.all_gather_into_tensor(torch.zeros(RANKS, dtype=torch.bfloat16), torch.ones(1)),
        "16 elements of torch.bfloat16, that of one rank 1 of torch.float32",
    ),
    "a sum that can't be divided": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(17)),
        "reduce_scatter over 16 ranks: the tensor of all ranks has 17 elements",
    ),
    "parts of another size": (
        lambda: dist.reduce_scatter(torch.zeros(1), [torch.ones(2)] * RANKS),
        "reduce_scatter: a tensor of its list has 2 elements of torch.float32, the tensor given with it 1 of torch",
    ),
    "an all-to-all that can't be divided": (
        lambda: dist.all_to_all_single(torch.zeros(17), torch.ones(17)),
        "all_to_all: 17 rows can't be divided over 16 ranks evenly",
    ),
    "an all-to-all with wrong sizes": (
        lambda: dist.all_to_all_single(torch.zeros(16), torch.ones(17), [1] * 16, [1] * 16),
        r"17 rows can't be divided over 16 ranks in parts of \[1, 1",
    ),
    "an all-to-all of rows of another size": (
        lambda: dist.all_to_all_single(torch.zeros(RANKS, 2), torch.ones(RANKS, 3)),
        "all_to_all: rows of 3 elements of torch.float32 can't fill rows of 2 of torch.float32",
    ),
    "an all-to-all whose message to itself does not fit": (
        lambda: dist.all_to_all([torch.zeros(2)] * RANKS, [torch.ones(3)] * RANKS),
        "all_to_all: a tensor of its list has 3 elements of torch.float32, the tensor given with it 2 of",
    ),
    "more lists than ranks": (
        lambda: dist.group.WORLD.allgather_coalesced(  # type: ignore[union-attr]
            [[torch.zeros(1)]] * (RANKS + 1), [torch.ones(1)]
        ),
        "all_gather over 16 ranks: its list has 17 tensors, not one for each",
    ),
    "a reduction that is not emulated": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(RANKS), dist.ReduceOp.BXOR),
        "there is no BXOR of tensors of torch.float32",
    ),
    "a scaled sum": (
        lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)),  # type: ignore[attr-defined]
        "the reduction .*PREMUL_SUM is not emulated: sum",
    ),
    "a group of a rank that is not there": (lambda: dist.new_group([0, 99]), "rank 99|world_size|the new group"),
    "a split group": (lambda: dist.split_group(split_ranks=[[0, 1]]), "split|not emulated"),
    "a mesh that is too large": (lambda: init_device_mesh("cpu", (4, 8)), "bigger than|size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_call_that_can_not_be_emulated_is_an_error_at_once(world: Any, case: str) -> None:
    call, words = REFUSED[case]
    start = time.monotonic()
    with pytest.raises(Exception, match=words):
        call()
    assert time.monotonic() - start < 10


def test_coalesced_and_functional_collectives_give_what_the_plain_ones_do(world: Any) -> None:
    tensors = [numbers(2), numbers(3)]
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(tensor.equal(RANKS * numbers(len(tensor))) for tensor in tensors)
    gathered = [torch.zeros(RANKS * 2), torch.zeros(RANKS * 3)]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for output, size in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, numbers(size))
    assert [len(output) for output in gathered] == [32, 48]
    assert gathered[1].equal(numbers(3).repeat(RANKS))
    assert functional.all_reduce(numbers(2), "sum", world).equal(RANKS * numbers(2))
    assert functional.all_gather_tensor(numbers(2), 0, world).equal(numbers(2).repeat(RANKS))
    assert functional.reduce_scatter_tensor(numbers(RANKS * 2), "avg", 0, world).equal(numbers(2))
    assert functional.broadcast(numbers(2), 0, world).equal(numbers(2))
    assert functional.all_to_all_single(numbers(RANKS), None, None, world).equal(torch.ones(RANKS))
    (one,) = functional.all_reduce_coalesced([numbers(2)], "sum", world)
    assert one.equal(RANKS * numbers(2))


def test_objects_are_gathered_and_scattered_by_this_rank(world: Any) -> None:
    gathered: list[Any] = [None] * RANKS
    dist.gather_object("mine", gathered, dst=0)
    assert gathered == ["mine"] * RANKS
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(RANKS)], src=0)
    assert mine == ["for 0"]


def test_mesh_of_nodes_and_devices_has_groups_of_its_own(world: Any) -> None:
    mesh = init_device_mesh("cpu", (NODES, RANKS // NODES), mesh_dim_names=("node", "device"))
    assert (mesh["node"].size(), mesh["device"].size()) == (2, 8)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh["device"].get_group())
    assert tensor.item() == 8.0


def test_message_takes_the_link_between_its_two_ranks_alone() -> None:
    free, lan = ShardingLink(all_gather=NONE, reduce_scatter=NONE), CollectiveFit(latency_s=0.2, s_per_byte=0.0)
    levels = HierarchicalLinks(intra_node=free, inter_node=lan, hierarchical=free)
    slow = cluster(SLOW).model_copy(update={"hierarchical_links": levels})
    join(EmulatedLinks(slow))
    try:
        start = time.perf_counter()
        dist.send(torch.ones(1), 1)
        inside_s = time.perf_counter() - start
        dist.send(torch.ones(1), 8)
        between_s = time.perf_counter() - start - inside_s
    finally:
        dist.destroy_process_group()
    assert inside_s < 0.05 <= 0.1 <= between_s  # half an all-reduce of two ranks


def test_group_of_another_backend_is_an_error_not_a_hang(world: Any) -> None:
    start = time.monotonic()
    with pytest.raises(Exception, match="stands for all 16 ranks of an emulated cluster"):
        dist.new_group(list(range(RANKS)), backend="gloo")
    assert time.monotonic() - start < 10


def test_node_groups_and_layout_are_those_of_the_cluster(world: Any) -> None:
    assert detect_node_layout(world, 0) == ((8, 8), True)
    groups = NodeGroups.create(world, NODES)
    assert (groups.intra_node.size(), groups.inter_node.size()) == (8, 2)
    communicator = HierarchicalCommunicator(groups)
    flat, shard = torch.zeros(RANKS * 2), torch.zeros(2)
    communicator.reduce_scatter(shard, numbers(RANKS * 2))
    assert shard.equal(RANKS * numbers(2))
    communicator.all_gather(flat, shard)
    assert flat.equal(shard.repeat(RANKS))


@pytest.mark.parametrize("world", [SLOW], indirect=True)
def test_collectives_take_their_time_one_after_the_other(world: Any) -> None:
    start = time.perf_counter()
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    assert not works[2].is_completed()
    works[2].wait()  # what was computed meanwhile would have been hidden
    assert time.perf_counter() - start >= 0.149
    assert all(work.is_completed() for work in works)


@pytest.mark.parametrize("world", [SLOW], indirect=True)
def test_ddp_waits_for_its_reduction(world: Any) -> None:
    module = DistributedDataParallel(nn.Linear(2, 2))
    start = time.perf_counter()
    module(torch.ones(1, 2)).sum().backward()
    assert time.perf_counter() - start >= 0.049


def test_second_group_in_a_process_is_refused(world: Any) -> None:
    with pytest.raises(ConfigurationError, match="in a process group already"):
        EmulatedCluster("h100-80gb-nvlink")


def test_trainer_with_several_devices_is_refused() -> None:
    try:
        with pytest.raises(ConfigurationError, match="give the Trainer devices=1"):
            EmulatedCluster(cluster()).validate_settings(num_devices=2, num_nodes=1)
    finally:
        dist.destroy_process_group()
