"""Measures compute (the paper's gamma): seconds of a traced step's operators, of its blocks, and of what is outside.

Each is the sum of its kernels' times and of autograd's own, which it takes for each node. Equal kernels of equal
operators are measured once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_osdp.planning.choices import granularities
from lightning_osdp.planning.cluster import ComputeTimes, OperatorTime, Scratch, SplitTime
from lightning_osdp.planning.operators import OUTSIDE, Line, Phase
from lightning_osdp.planning.rehearsed import rising
from lightning_osdp.planning.wishes import NO_WISHES, Wishes
from lightning_osdp.profiling.kernels import Kernel
from lightning_osdp.profiling.splits import product_of
from lightning_osdp.profiling.standins import kept_randomness
from lightning_osdp.profiling.timing import PLENTY_BYTES, Clock, Overhead, Progress, node_overhead, run_all, time_all
from lightning_osdp.profiling.trace import Trace


def measure(
    trace: Trace,
    device: torch.device,
    *,
    progress: Progress | None = None,
    time_budget_s: float = 4.0,
    wishes: Wishes = NO_WISHES,
    room_bytes: int = PLENTY_BYTES,
) -> ComputeTimes:
    """Times every different kernel of ``trace`` on ``device``, and those that operators would run if they were split.

    Args:
        trace: of one training step, at one or two batch sizes.
        device: the device to measure; its random state is left as it was.
        progress: called with (kernels done, kernels in all).
        time_budget_s: about how long to take; kernels are repeated less often to keep to it, but all run once.
        wishes: in how many slices operators may be split: no others are measured.
        room_bytes: of memory that is free; half of it may be taken by more than one kernel's arguments.

    Returns:
        Forward and backward seconds of each operator, and of what belongs to none, as lines over the batch size, and
        the optimizer's seconds per byte of trainable parameter.
    """
    splits = _splits(trace, wishes)
    select = _Selection(trace.kernels)
    kernels = [*(kernel for size in trace.kernels.values() for kernel in size), *trace.optimizer_kernels]
    kernels += [kernel for split in splits for phases in split.kernels.values() for phase in phases for kernel in phase]
    scratch: dict[object, int] = {}
    with kept_randomness(device), torch.no_grad():
        seconds = time_all(kernels, Clock(device, room_bytes), progress, time_budget_s, scratch)
    with kept_randomness(device):
        overhead = node_overhead(Clock(device))
    operators = [
        _operator_time(select, index, seconds, overhead, [split for split in splits if split.operator == index])
        for index in range(len(trace.description.operators))
    ]
    trainable = sum(p.gradient_bytes for operator in trace.description.operators for p in operator.parameters)
    update = sum(seconds[kernel.key] * kernel.count for kernel in trace.optimizer_kernels)
    return ComputeTimes(
        operators=tuple(operators),
        outside=_operator_time(select, OUTSIDE, seconds, overhead),
        optimizer_s_per_byte=update / trainable if trainable else 0.0,
        blocks=tuple(
            _time_along(select.of_block(index), seconds, overhead.forward_s)
            for index in range(len(trace.description.blocks))
        ),
        scratch=tuple(
            Scratch(
                forward=_most_along(select.of(index, "forward"), scratch),
                backward=_most_along(select.of(index, "backward"), scratch),
            )
            for index in range(len(operators))
        ),
    )


def warm_up(trace: Trace, device: torch.device) -> None:
    """Runs every different kernel of the smaller batch size, as far as it can be run by itself.

    Libraries load their code and take their scratch memory at the first call. Where measurements come from a cache,
    this has not happened yet, and the process's overhead would be read too low.
    """
    with kept_randomness(device), torch.no_grad():
        run_all(trace.kernels[min(trace.kernels)], device)


Selected = Mapping[int, Sequence[Kernel]]
"""Some of a step's kernels, by batch size."""


class _Selection:
    """Finds the kernels of a step by what they belong to."""

    def __init__(self, kernels: Mapping[int, Sequence[Kernel]]) -> None:
        self.sizes = tuple(kernels)
        self._found: dict[tuple[int, str, int], dict[int, list[Kernel]]] = {}
        for size, each in kernels.items():
            for kernel in each:
                self._add((kernel.operator, kernel.phase, OUTSIDE), size, kernel)
                if kernel.block != OUTSIDE:
                    self._add((OUTSIDE, "forward", kernel.block), size, kernel)

    def of(self, operator: int, phase: Phase) -> Selected:
        """Those of an operator, or of what belongs to none."""
        return self._of((operator, phase, OUTSIDE))

    def of_block(self, block: int) -> Selected:
        """Those of a block's forward that belong to no operator."""
        return self._of((OUTSIDE, "forward", block))

    def _add(self, key: tuple[int, str, int], size: int, kernel: Kernel) -> None:
        self._found.setdefault(key, {}).setdefault(size, []).append(kernel)

    def _of(self, key: tuple[int, str, int]) -> Selected:
        found = self._found.get(key, {})
        return {size: found.get(size, []) for size in self.sizes}


@dataclass(frozen=True)
class _Split:
    """One way to split one operator.

    Attributes:
        operator: its index.
        dim, slices: how its weight is cut.
        kernels: what forward and backward run instead of the product, by batch size.
        products: what they run instead of, by batch size.
    """

    operator: int
    dim: int
    slices: int
    kernels: Mapping[int, tuple[list[Kernel], list[Kernel]]]
    products: Mapping[int, tuple[list[Kernel], list[Kernel]]]


def _splits(trace: Trace, wishes: Wishes) -> list[_Split]:
    """All ways to split that may be offered to the search."""
    own: dict[int, dict[int, list[Kernel]]] = {}
    for size, kernels in trace.kernels.items():
        for kernel in kernels:
            own.setdefault(kernel.operator, {}).setdefault(size, []).append(kernel)
    found = []
    for index, operator in enumerate(trace.description.operators):
        products = {size: product_of(kernels) for size, kernels in own.get(index, {}).items()}
        for k in granularities(operator, wishes.granularities(operator.name)):
            known = {size: product for size, product in products.items() if product is not None}
            if len(known) < len(trace.kernels):
                continue
            outputs = operator.split_dims[0] in operator.output_dims
            found.append(
                _Split(
                    index,
                    operator.split_dims[0],
                    k,
                    {size: product.split(k, outputs=outputs) for size, product in known.items()},
                    {size: ([product.forward], list(product.backward)) for size, product in known.items()},
                )
            )
    return found


def _operator_time(
    select: _Selection,
    operator: int,
    seconds: Mapping[object, float],
    overhead: Overhead,
    splits: Sequence[_Split] = (),
) -> OperatorTime:
    forward = _time_along(select.of(operator, "forward"), seconds, overhead.forward_s)
    backward = _time_along(select.of(operator, "backward"), seconds, overhead.backward_s)
    times = []
    for split in splits:
        first, second = (
            rising(
                [
                    (size, max(0.0, whole.at(size) + _more_s(split, size, phase, seconds, overhead)))
                    for size in sorted(select.sizes)
                ]
            )
            for phase, whole in enumerate((forward, backward))
        )
        times.append(SplitTime(dim=split.dim, slices=split.slices, forward=first, backward=second))
    return OperatorTime(forward=forward, backward=backward, splits=tuple(times))


def _more_s(split: _Split, size: int, phase: int, seconds: Mapping[object, float], overhead: Overhead) -> float:
    """What splitting adds to an operator's forward (0) or backward (1) at one batch size: kernels and autograd."""
    instead = sum(seconds[kernel.key] * kernel.count for kernel in split.kernels[size][phase])
    before = sum(seconds[kernel.key] * kernel.count for kernel in split.products[size][phase])
    node = overhead.forward_s if phase == 0 else overhead.backward_s
    return instead - before + (split.slices - 1) * node


def _time_along(kernels: Selected, seconds: Mapping[object, float], per_node_s: float) -> Line:
    """Seconds of some kernels over the batch size."""
    return rising(
        [
            (size, sum(seconds[kernel.key] * kernel.count + per_node_s * kernel.num_nodes for kernel in found))
            for size, found in sorted(kernels.items())
        ]
    )


def _most_along(kernels: Selected, scratch: Mapping[object, int]) -> Line:
    """Scratch bytes of the kernel that takes most, over the batch size."""
    return rising(
        [(size, max((scratch.get(one.key, 0) for one in found), default=0)) for size, found in sorted(kernels.items())]
    )
