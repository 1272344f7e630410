"""Arguments of kernels that are run by themselves: integers that say lengths or offsets fit what they describe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_osdp.profiling.kernels.kernel import Kernel, spec_of
from lightning_osdp.profiling.kernels.synthetic_args import make_arguments

aten = torch.ops.aten
TIME, BATCH, CLASSES, LABELS = 40, 3, 5, 4


def kernel_of(func: Any, *args: Any) -> Kernel:
    return Kernel(func, tuple(spec_of(arg) for arg in args))


def ctc_inputs(is_flat: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (BATCH * LABELS,) if is_flat else (BATCH, LABELS)
    targets = torch.ones(shape, dtype=torch.long)
    return torch.zeros(TIME, BATCH, CLASSES), targets, torch.full((BATCH,), TIME), torch.full((BATCH,), LABELS)


@pytest.mark.parametrize("is_flat", [True, False])
def test_ctc_loss_gets_lengths_of_its_targets_forward_and_backward(is_flat: bool) -> None:
    """With random ones its backward, which checks nothing, read beyond the targets and ended the process."""
    inputs = ctc_inputs(is_flat)
    losses, alpha = aten._ctc_loss.Tensor(*inputs)
    forward = kernel_of(aten._ctc_loss.Tensor, *inputs)
    backward = kernel_of(aten._ctc_loss_backward.Tensor, losses, *inputs, losses, alpha, 0)
    for _ in range(20):
        for kernel, first in ((forward, 0), (backward, 1)):
            args, kwargs = make_arguments(kernel, torch.device("cpu"))
            _, targets, input_lengths, target_lengths = args[first : first + 4]
            assert input_lengths.tolist() == [TIME] * BATCH
            assert target_lengths.tolist() == [LABELS] * BATCH
            assert int(targets.max()) < CLASSES
            kernel.func(*args, **kwargs)


def test_embedding_bag_gets_ascending_offsets_within_its_indices() -> None:
    kernel = kernel_of(
        aten._embedding_bag.default,
        torch.zeros(7, 4),
        torch.zeros(12, dtype=torch.long),
        torch.zeros(3, dtype=torch.long),
    )
    args, kwargs = make_arguments(kernel, torch.device("cpu"))
    assert args[2].tolist() == [0, 4, 8]
    assert kernel.func(*args, **kwargs)[0].shape == (3, 4)


def test_lengths_of_something_unknown_are_zero() -> None:
    kernel = kernel_of(aten.segment_reduce.default, torch.zeros(6, 2), "sum")
    kernel = Kernel(kernel.func, kernel.args, (("lengths", spec_of(torch.zeros(3, dtype=torch.long))),))
    _, kwargs = make_arguments(kernel, torch.device("cpu"))
    assert kwargs["lengths"].tolist() == [0, 0, 0]
