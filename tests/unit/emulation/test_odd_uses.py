"""Uses of an emulated group that are not the engine's: the right value or an error at once, and never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric, SumMetric

from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups
from lightning_osdp.errors import ConfigurationError

RANKS = 16

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Running all_reduce on global rank 0 which does not belong to the given group"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated"),
]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[Any]:
    join(EmulatedLinks(resolve_cluster("2xa100-80gb-nvlink+200gbit", RANKS)))
    yield dist.group.WORLD
    dist.destroy_process_group()


def numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def reduced(tensor: Tensor, *args: Any, **options: Any) -> Any:
    dist.all_reduce(tensor, *args, **options)
    return tensor.tolist()


def objects_of_a_group(ranks: list[int]) -> list[Any]:
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, "mine", group=dist.new_group(ranks))
    return found


def broadcast_in_a_group() -> list[Any]:
    values = [{"a": 1}, 2]
    dist.broadcast_object_list(values, src=0, group=dist.new_group([0, 3, 7]))
    return values


def gathered_by_another_rank() -> Any:
    dist.gather_object("mine", None, dst=3)
    return "went on"


def waited_for_a_future() -> list[float]:
    tensor = numbers(2)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] + 1).wait().tolist()


def finished(work: Any) -> bool:
    work.wait()
    return bool(work.is_completed())


def messages_in_a_group() -> list[float]:
    group, received = dist.new_group([0, 9]), torch.zeros(3)
    ops = [
        dist.P2POp(dist.isend, numbers(3), group=group, group_peer=1, tag=7),
        dist.P2POp(dist.irecv, received, group=group, group_peer=1, tag=7),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received.tolist()


def received_into_a_parameter() -> list[float]:
    weight = nn.Parameter(torch.zeros(2))
    dist.send(numbers(2), 1)
    dist.recv(weight, 1)
    return weight.tolist()


def received_from_whoever_sends() -> Any:
    received = torch.zeros(2)
    dist.send(numbers(2), 3)
    return dist.recv(received), received.tolist()


def gathered_rows(*shape: int) -> list[Any]:
    output = torch.zeros(*shape)
    dist.all_gather_into_tensor(output, numbers(2))
    return output.flatten().tolist()


def uneven_exchange() -> list[float]:
    """A rank that is not there sends as much as this one sends to it, which is not known: zeros."""
    output, sizes = torch.ones(RANKS + 1), [2] + [1] * (RANKS - 1)
    dist.all_to_all_single(output, numbers(RANKS + 1), sizes, sizes)
    return output.tolist()


def reduced_by_another_rank() -> list[float]:
    tensor = numbers(2)
    dist.reduce(tensor, dst=7)
    return tensor.tolist()


def scattered_by_another_rank() -> int:
    output = torch.zeros(2)
    dist.scatter(output, None, src=5)
    return output.numel()


def gradient_of_a_sum() -> list[float]:
    weight = numbers(2).requires_grad_()
    differentiable.all_reduce(weight).sum().backward()
    return weight.grad.tolist()  # type: ignore[union-attr]


def trained_with_hook(hook: Callable[..., Any], state: Any = None) -> Tensor:
    """Gradients of a linear layer whose inputs are ones, averaged by the hook."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3))
    model.register_comm_hook(state, hook)
    model(torch.ones(2, 4)).sum().backward()
    return model.module.weight.grad


def averaged_in_a_group_of_its_own(bucket: Any) -> Any:
    """Averages over the ranks of a group that is made while the backward pass runs."""
    group = dist.new_group([0, 1, 2, 3])
    buffer = bucket.buffer().div_(4)
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def sparse_gradient() -> list[float]:
    model = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    model(torch.tensor([1, 1, 3])).sum().backward()
    return model.module.weight.grad.to_dense()[:, 0].tolist()


def sharded_tensor() -> list[Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = numbers(RANKS * 2, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    again = sharded.redistribute(mesh, [Replicate()])
    assert isinstance(again, DTensor)
    return [sharded.to_local().tolist(), list(again.to_local().shape), list(sharded.full_tensor().shape)]


def partial_product() -> list[Any]:
    """Over a mesh of nodes and devices: this rank's rows times columns, whose parts are added."""
    mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("node", "device"))["device"]
    left, right = (
        distribute_tensor(torch.ones(shape), mesh, [Shard(dim)]) for shape, dim in (((4, 16), 1), ((16, 2), 0))
    )
    return (left @ right).full_tensor().tolist()


def metric(kind: Any) -> float:
    found = kind()
    found.update(torch.tensor([1.0, 5.0]))
    return float(found.compute())


RIGHT: dict[str, tuple[Callable[[], Any], Any]] = {
    "objects of all ranks of a group of five": (lambda: objects_of_a_group([0, 2, 5, 9, 15]), ["mine"] * 5),
    "objects in a group of one": (lambda: objects_of_a_group([0]), ["mine"]),
    "objects of a group that this rank sends": (broadcast_in_a_group, [{"a": 1}, 2]),
    "objects that another rank gathers": (gathered_by_another_rank, "went on"),
    "a sum of integers": (lambda: reduced(torch.tensor([3])), [48]),
    "a sum of truths": (lambda: reduced(torch.tensor([True, False])), [True, False]),
    "a largest of truths": (lambda: reduced(torch.tensor([True, False]), dist.ReduceOp.MAX), [True, False]),
    "a sum of complex numbers": (lambda: reduced(torch.tensor([1 + 2j])), [16 + 32j]),
    "a sum of nothing": (lambda: reduced(torch.empty(0)), []),
    "a sum of a number": (lambda: reduced(torch.tensor(2.0)), 32.0),
    "a sum of a transposed matrix": (lambda: reduced(numbers(2, 2).t()), [[16.0, 48.0], [32.0, 64.0]]),
    "a sum in a group over two nodes": (lambda: reduced(torch.ones(1), group=dist.new_group([0, 1, 8])), [3.0]),
    "a sum in a group of other ranks": (lambda: reduced(torch.ones(1), group=dist.new_group([3, 4])), [1.0]),
    "a sum in a group that tells the others later": (
        lambda: reduced(torch.ones(1), group=dist.new_group([0, 1], use_local_synchronization=True)),
        [2.0],
    ),
    "a future and what follows": (waited_for_a_future, [17.0, 33.0]),
    "a barrier that goes on": (lambda: finished(dist.barrier(async_op=True)), True),
    "a barrier of a device": (lambda: dist.barrier(device_ids=[0]), None),
    "messages of a group of two, with tags": (messages_in_a_group, [1.0, 2.0, 3.0]),
    "a message into a parameter": (received_into_a_parameter, [1.0, 2.0]),
    "a message from whoever sends one": (received_from_whoever_sends, (1, [1.0, 2.0])),
    "rows gathered into a matrix": (lambda: gathered_rows(RANKS, 2), [1.0, 2.0] * RANKS),
    "rows gathered into blocks": (lambda: gathered_rows(2, RANKS), [1.0, 2.0] * RANKS),
    "an uneven exchange": (uneven_exchange, [1.0, 2.0] + [0.0] * (RANKS - 1)),
    "a sum that another rank gets": (reduced_by_another_rank, [16.0, 32.0]),
    "what another rank scatters": (scattered_by_another_rank, 2),
    "the gradient of a sum": (gradient_of_a_sum, [16.0, 16.0]),
    "a sparse gradient of DDP": (sparse_gradient, [0.0, 2.0, 0.0, 1.0, 0.0]),
    "a tensor sharded over a mesh": (sharded_tensor, [numbers(32, 3)[:2].tolist(), [32, 3], [32, 3]]),
    "a product of sharded matrices": (partial_product, [[16.0, 16.0]] * 4),
    "a metric's mean": (lambda: metric(MeanMetric), 3.0),
    "a metric's sum": (lambda: metric(SumMetric), 6.0 * RANKS),
}


@pytest.mark.parametrize("name", RIGHT)
def test_odd_use_gives_the_value_of_ranks_that_all_have_the_same(name: str) -> None:
    call, expected = RIGHT[name]
    start = time.monotonic()
    assert call() == expected
    assert time.monotonic() - start < 20


HOOKS: dict[str, tuple[Callable[..., Any], Any]] = {
    "all-reduce": (default_hooks.allreduce_hook, None),
    "fp16": (default_hooks.fp16_compress_hook, None),
    "a group of its own": (lambda state, bucket: averaged_in_a_group_of_its_own(bucket), None),
    "powerSGD": (powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hook_of_ddp_averages_equal_gradients_to_the_same(name: str) -> None:
    hook, state = HOOKS[name]
    assert trained_with_hook(hook, state and state()).equal(torch.full((3, 4), 2.0))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a monitored barrier": (lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)), "only implemented for GLOO"),
    "rows gathered into a transposed matrix": (
        lambda: dist.all_gather_into_tensor(torch.zeros(2, RANKS).t(), numbers(2)),
        "all_gather: the tensor of all ranks is not contiguous|must be contiguous",
    ),
    "a message to oneself": (lambda: dist.send(numbers(2), 0), "should not be the same as the rank"),
    "rows of two sizes": (
        lambda: dist.all_gather([torch.zeros(2 + rank % 2) for rank in range(RANKS)], numbers(2)),
        "all_gather: a tensor of its list has 2 elements of torch.float32, the tensor given with it 3|3 elements",
    ),
    "objects that another rank scatters in a group": (
        lambda: dist.scatter_object_list([None], None, src=3, group=dist.new_group([0, 3])),
        "a broadcast from rank 3 is not emulated",
    ),
    "a length that another rank has": (lambda: dist.broadcast(torch.zeros(1, dtype=torch.int64), 2), "from rank 2 is"),
    "synchronized batch norm on a CPU": (
        lambda: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)))(torch.ones(3, 2)),
        "SyncBatchNorm layers only work with GPU modules",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_odd_use_that_can_not_be_emulated_is_an_error_at_once(name: str) -> None:
    call, words = REFUSED[name]
    start = time.monotonic()
    with pytest.raises(Exception, match=words):
        call()
    assert time.monotonic() - start < 10


def test_groups_of_tensor_parallelism_on_a_gpu_need_no_other_backend(world: Any) -> None:
    groups = TensorGroups.create(world, 4, torch.device("cuda"))
    assert (groups.host.size(), groups.replica_hosts.size()) == (4, 4)


@pytest.mark.parametrize(
    ("hardware", "devices", "nodes", "words"),
    [
        ("2xa100-80gb-nvlink+200gbit", 1, 2, "1 devices can't be spread evenly over 2 nodes"),
        ("100000xa100-80gb-nvlink+200gbit", None, None, "800,000 ranks can't be emulated: 65,536 at most"),
        ("3xa100-80gb-nvlink+200gbit", 23, None, "23 devices can't be spread evenly"),
        ("a100-80gb-nvlink", 2**40, None, "has 1 to 8 devices, not 1099511627776"),
        ("a100-80gb-nvlink", True, None, "devices=True is not a positive whole number"),
        ("", 8, None, "no hardware is called ''"),
    ],
)
def test_number_of_ranks_that_can_not_be_emulated_is_named(
    hardware: str, devices: int | None, nodes: int | None, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve_cluster(hardware, devices, nodes)
