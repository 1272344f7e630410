"""Replicated gradients on their way to be averaged: freed once packed, and right in every type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine import gradient_buckets
from lightning_osdp.engine.gradient_buckets import BucketedAllReduce, GradientSync
from tests.support.models import some_cluster

RANKS, WIDTH, LAYERS = 8, 32, 6
ONE = WIDTH * WIDTH * 4
"""Bytes of a gradient."""


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    join(EmulatedLinks(some_cluster(RANKS, backend="emulated")))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gradients to a bucket."""
    monkeypatch.setitem(gradient_buckets.BUCKET_BYTES, "cpu", 2 * ONE)


class Stack(nn.Module):
    """Layers in a row; ``unused`` takes no part."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.unused = nn.Parameter(torch.zeros(3))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def averaged(model: nn.Module, dtype: torch.dtype | None = None) -> BucketedAllReduce:
    return BucketedAllReduce(
        list(model.parameters()), dist.group.WORLD, GradientSync(), lambda: None, lambda: None, dtype
    )


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def plain_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    model = Stack(dtype)
    model(inputs(dtype)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("limit", [1 << 20, ONE], ids=["packed", "one by one"])
@pytest.mark.parametrize(
    ("own", "reduced"),
    [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, None)],
    ids=str,
)
def test_gradients_are_freed_once_packed_and_end_as_those_of_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch, limit: int, own: torch.dtype, reduced: torch.dtype | None
) -> None:
    monkeypatch.setitem(gradient_buckets.UNBUCKETED_BYTES, "cpu", limit)
    model = Stack(own)
    reducer, start, packed, buffers = averaged(model, reduced), gradient_buckets.all_reduce_async, [], set()
    pack = BucketedAllReduce._pack

    def noting_pack(self: BucketedAllReduce, bucket: Any) -> Tensor:
        packed.extend(StorageWeakRef(p.grad.untyped_storage()) for p in bucket.parameters if p.grad is not None)
        return pack(self, bucket)

    def noting_start(buffer: Tensor, group: Any) -> Any:
        assert buffer.dtype == (reduced or own)
        buffers.add(buffer.untyped_storage()._cdata)
        return start(buffer, group)

    monkeypatch.setattr(BucketedAllReduce, "_pack", noting_pack)
    monkeypatch.setattr(gradient_buckets, "all_reduce_async", noting_start)
    seen: list[list[bool]] = []

    def look(*_: Any) -> None:
        seen.append([gradient.expired() or gradient.cdata in buffers for gradient in packed])
        seen.append([layer.weight.grad is None for layer in model.layers[2:]])

    model.layers[1].register_full_backward_hook(look)
    model(inputs(own)).backward()
    reducer.finish()
    freed, is_shown_without = seen
    assert len(freed) >= LAYERS - 2
    assert all(freed)
    assert is_shown_without == [True] * (LAYERS - 2)
    for parameter, expected in zip(model.parameters(), plain_gradients(own), strict=True):
        if expected is None:
            assert parameter.grad is None
        else:
            rough = torch.bfloat16 in (own, reduced)
            torch.testing.assert_close(parameter.grad, expected, rtol=2**-7 if rough else 1e-6, atol=0)


def test_bucket_that_waits_for_a_late_gradient_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are reduced alone, as soon as they come, though the small gradients between them share buckets."""
    monkeypatch.setitem(gradient_buckets.UNBUCKETED_BYTES, "cpu", ONE)
    monkeypatch.setitem(gradient_buckets.BUCKET_BYTES, "cpu", 2 * WIDTH * 4)  # of two biases
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    reducer, started = averaged(model), []
    start = gradient_buckets.all_reduce_async

    def noting_start(buffer: Tensor, group: Any) -> Any:
        started.append(buffer.nbytes)
        return start(buffer, group)

    monkeypatch.setattr(gradient_buckets, "all_reduce_async", noting_start)
    seen: list[int] = []
    for layer in model:  # called when the gradients of the layer after it have come
        layer.register_full_backward_pre_hook(lambda *_: seen.append(started.count(ONE)))
    model(inputs().requires_grad_()).sum().backward()
    reducer.finish()
    assert seen == list(range(LAYERS))
    assert len(started) == LAYERS + LAYERS // 2


def test_hook_reads_the_gradient_of_its_own_rank() -> None:
    model, read = Stack(), []
    reducer = averaged(model)
    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(lambda p: read.append(float(p.grad.norm())))
    model(inputs()).backward()
    reducer.finish()
    expected = [float(gradient.norm()) for gradient in plain_gradients() if gradient is not None]
    assert read == pytest.approx(expected[::-1])


def double_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


@pytest.mark.parametrize("is_late", [False, True], ids=["before training", "later"])
def test_hook_changes_what_is_averaged(is_late: bool) -> None:
    model = Stack()
    reducer = averaged(model) if is_late else None
    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(double_in_place)
    reducer = reducer or averaged(model)
    model(inputs()).backward()
    reducer.finish()
    for parameter, expected in zip(model.parameters(), plain_gradients(), strict=True):
        if expected is not None:
            torch.testing.assert_close(parameter.grad, 2 * expected)
