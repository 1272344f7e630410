"""Measures compute (the paper's gamma): seconds of a traced step's operators, of its blocks, and of what is outside.

Each is the sum of its kernels' times and of autograd's own, which it takes for each node. Equal kernels of equal
operators are measured once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from lightning_osdp.profiling.timing import (
    PLENTY_BYTES,
    Clock,
    Overhead,
    Progress,
    Timed,
    in_order,
    node_overhead,
    run_all,
    time_all,
    time_some,
)
from lightning_osdp.profiling.trace import Trace

BUDGET_S = 4.0
"""Seconds that timing kernels is to take, of all ranks that share it together. All run twice at least."""


def measure_share(
    trace: Trace,
    device: torch.device,
    place: int,
    sharers: int,
    *,
    progress: Progress | None = None,
    time_budget_s: float = BUDGET_S,
    wishes: Wishes = NO_WISHES,
    room_bytes: int = PLENTY_BYTES,
) -> Timed:
    """Times one of ``sharers`` equal parts of what ``measure`` needs; kernels are named (``Kernel.name``).

    An optimizer's kernels belong to no part: they take as long as the memory that ranks share, and are for all ranks
    to time together. Other arguments as in ``measure``.
    """
    unique: dict[object, Kernel] = {kernel.key: kernel for kernel in _all_kernels(trace, _splits(trace, wishes))}
    parts = in_order(kernel for kernel in unique.values() if kernel.phase != "optimizer")
    timed = Timed()
    with kept_randomness(device), torch.no_grad():
        time_some(parts[place::sharers], Clock(device, room_bytes), progress, time_budget_s, timed)
    return Timed(
        {unique[key].name: value for key, value in timed.seconds.items()},
        {unique[key].name: value for key, value in timed.scratch.items()},
    )


def measure(
    trace: Trace,
    device: torch.device,
    *,
    progress: Progress | None = None,
    time_budget_s: float = BUDGET_S,
    wishes: Wishes = NO_WISHES,
    room_bytes: int = PLENTY_BYTES,
    shares: Sequence[Timed] = (),
) -> ComputeTimes:
    """Times every different kernel of ``trace`` on ``device``, and those that operators would run if they were split.

    Args:
        trace: of one training step, at one or two batch sizes.
        device: the device to measure; its random state is left as it was.
        progress: called with (kernels done, kernels in all).
        time_budget_s: about how long to take; kernels are repeated less often to keep to it, but all run once.
        wishes: in how many slices operators may be split: no others are measured.
        room_bytes: of memory that is free; half of it may be taken by more than one kernel's arguments.
        shares: what ``measure_share`` has found: those kernels are not timed again.

    Returns:
        Forward and backward seconds of each operator, and of what belongs to none, as lines over the batch size, and
        the optimizer's seconds per byte of trainable parameter.
    """
    splits = _splits(trace, wishes)
    select = _Selection(trace.kernels)
    kernels = _all_kernels(trace, splits)
    timed = _known(kernels, shares)
    with kept_randomness(device), torch.no_grad():
        time_all(kernels, Clock(device, room_bytes), progress, time_budget_s, timed)
    seconds, scratch = timed.seconds, timed.scratch
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


def _all_kernels(trace: Trace, splits: Sequence[_Split]) -> list[Kernel]:
    """Of the step, of the optimizer, and of operators that are split."""
    kernels = [*(kernel for size in trace.kernels.values() for kernel in size), *trace.optimizer_kernels]
    kernels += [kernel for split in splits for phases in split.kernels.values() for phase in phases for kernel in phase]
    return kernels


def _known(kernels: Iterable[Kernel], shares: Sequence[Timed]) -> Timed:
    """Shares, by the kernels' keys."""
    timed = Timed()
    for key, name in {kernel.key: kernel.name for kernel in kernels}.items() if shares else ():
        for share in shares:
            if name in share.seconds:
                timed.seconds[key] = share.seconds[name]
            if name in share.scratch:
                timed.scratch[key] = share.scratch[name]
    return timed


def warm_up(trace: Trace, device: torch.device) -> None:
    """Runs every different kernel of the larger batch size, as far as it can be run by itself.

    Libraries load their code and take their scratch memory at the first call. Where measurements come from a cache,
    this has not happened yet, and the process's overhead would be read too low. [measured, MKL, products with matrices
    of 1152 x 4608: 1.4 MiB stay after 128 rows, 19 after 512, and no more after 4096]
    """
    with kept_randomness(device), torch.no_grad():
        kernels = trace.whole().kernels
        run_all(kernels[max(kernels)], device)


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
            rising([(size, _more_s(split, size, phase, seconds, overhead)) for size in sorted(select.sizes)])
            for phase in range(2)
        )
        times.append(SplitTime(dim=split.dim, slices=split.slices, forward=first, backward=second))
    return OperatorTime(forward=forward, backward=backward, splits=tuple(times))


def _more_s(split: _Split, size: int, phase: int, seconds: Mapping[object, float], overhead: Overhead) -> float:
    """What splitting adds to an operator's forward (0) or backward (1) at one batch size: kernels and autograd.

    Never less than nothing: it is the same work in more calls. The clock's errors are larger than what it adds, and the
    best of many ways to split would be one that they flatter. [measured, W&S of 22 M parameters, 2 ranks: splits that
    promised 4 % more samples a second than the best plan without made 12 % fewer]
    """
    instead = sum(seconds[kernel.key] * kernel.count for kernel in split.kernels[size][phase])
    before = sum(seconds[kernel.key] * kernel.count for kernel in split.products[size][phase])
    node = overhead.forward_s if phase == 0 else overhead.backward_s
    return max(0.0, instead - before) + (split.slices - 1) * node


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
