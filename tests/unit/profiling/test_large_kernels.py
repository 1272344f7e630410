"""Kernels that would take minutes on a core are timed by smaller ones of their kind."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_osdp.profiling.kernels import benchmark
from lightning_osdp.profiling.kernels.benchmark import Clock, kernel_flops, sample_flops, time_within_budget
from lightning_osdp.profiling.kernels.kernel import Kernel, TensorSpec
from lightning_osdp.profiling.kernels.synthetic_args import make_arguments

aten = torch.ops.aten
F32 = torch.float32


def row_major(*shape: int) -> TensorSpec:
    return TensorSpec.contiguous(shape, F32)


def transposed(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((rows, columns), (1, rows), F32)


def attention(samples: int, heads: int, tokens: int) -> Kernel:
    one = row_major(samples, heads, tokens, 16)
    return Kernel(aten._scaled_dot_product_flash_attention_for_cpu.default, (one, one, one, 0.0, True))


LARGE = {
    "mm": Kernel(aten.mm.default, (row_major(2048, 4096), transposed(4096, 32000))),
    "addmm": Kernel(aten.addmm.default, (row_major(32000), row_major(2048, 4096), transposed(4096, 32000))),
    "addmm_": Kernel(aten.addmm_.default, (row_major(2048, 32000), row_major(2048, 4096), transposed(4096, 32000))),
    "long and thin": Kernel(aten.mm.default, (row_major(1 << 22, 80), row_major(80, 80))),
    "attention": attention(8, 32, 4096),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_kernel_is_replaced_by_one_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "MAX_FLOPS", 2e7)
    monkeypatch.setattr(benchmark, "SAMPLE_FLOPS", 1e7)
    sample = sample_flops(LARGE[name])
    assert kernel_flops(sample) < kernel_flops(LARGE[name]) / 10
    args, kwargs = make_arguments(sample, torch.device("cpu"))
    assert all(leaf.isfinite().all() for leaf in tree_leaves(sample.func(*args, **kwargs)) if leaf.is_floating_point())


def test_sample_keeps_proportions_and_order_in_memory() -> None:
    left, right = sample_flops(LARGE["mm"]).args
    assert isinstance(left, TensorSpec)
    assert isinstance(right, TensorSpec)
    assert left.shape[1] / left.shape[0] == pytest.approx(2, rel=0.01)
    assert (left.stride, right.stride) == ((left.shape[1], 1), (1, right.shape[0]))


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel(aten.mm.default, (row_major(512, 512), row_major(512, 512))),
        Kernel(aten.bmm.default, (row_major(64, 2048, 2048), row_major(64, 2048, 2048))),
        attention(2, 4, 64),
    ],
)
def test_other_kernels_stay_whole(kernel: Kernel) -> None:
    assert sample_flops(kernel) is kernel


def test_time_of_a_sample_counts_by_its_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a second."""
    monkeypatch.setattr(Clock, "time_s", lambda self, call: 1.0 if call() is not None else 0.0)
    monkeypatch.setattr(benchmark, "SAMPLE_FLOPS", 1e7)
    kernel = Kernel(aten.mm.default, (row_major(2048, 4096), row_major(4096, 2048)))
    times, _ = time_within_budget([kernel], Clock(torch.device("cpu")), 0.0)
    assert times[kernel.name].seconds == pytest.approx(kernel_flops(kernel) / kernel_flops(sample_flops(kernel)))
