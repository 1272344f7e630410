"""Measures compute (the paper's gamma): every kernel of a traced step once, by itself, with made-up arguments.

A step's time is the sum of its kernels' times and of autograd's own, which it takes for each node. Only one kernel's
arguments are in memory at a time, so a model that does not fit can be measured, and equal kernels of equal operators
are measured once.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.choices import granularities
from lightning_osdp.planning.cluster import ComputeTimes, OperatorTime, Scratch, SplitTime
from lightning_osdp.planning.operators import OUTSIDE, Line, Phase
from lightning_osdp.planning.rehearsed import rising
from lightning_osdp.planning.wishes import NO_WISHES, Wishes
from lightning_osdp.profiling.arguments import copied, made_up
from lightning_osdp.profiling.kernels import Kernel, TensorSpec, list_length, some_of_lists
from lightning_osdp.profiling.memory import memory_in_use, peak_memory, reset_peak
from lightning_osdp.profiling.splits import product_of
from lightning_osdp.profiling.standins import kept_randomness
from lightning_osdp.profiling.trace import Trace

aten = torch.ops.aten

WARMUPS = 2
"""Runs before the first timed one: the allocator and the libraries' plans settle."""

MAX_REPEATS = 15
"""Timed runs of one kernel; their median counts."""

AUTOGRAD_REPEATS = 5
"""Timed runs of a backward that is run by autograd."""

COLD_BYTES = 1 << 25
"""Copies of a kernel's arguments are taken in turn until they fill this much, because a step's tensors have left the
cache by the time they are read. [32 MiB; empirical, AMD EPYC with 32 MiB of cache, GPT of 4 layers: predicted forward
and backward are 0.95 to 1.03 of the measured with it, 0.88 to 0.95 on one set of arguments]"""

COLD_STATES_BYTES = 1 << 26
"""The same for an optimizer's kernels: a step has gone through all of the model when it comes to a parameter again.
[64 MiB; empirical, same processor, ViT of 14 M parameters: AdamW takes 0.6 of its time in training with half of it]"""

PLENTY_BYTES = 1 << 60
"""Of memory, where nobody has said how much is free."""

MAX_COPIES = 16
"""Most copies of one kernel's arguments."""

LEAST_SCRATCH_BYTES = 1 << 20
"""Less is not looked for: the process's own counters move by as much."""

OPAQUE_ARGUMENTS = frozenset({"workspace", "reserve", "reservespace"})
"""Names in aten's schemas of buffers that a library's forward leaves to its backward."""

BACKWARD_RATIO = 2.0
"""Time of a backward that can't be run at all against its forward: two matrix products for each one there."""

LIST_BYTES = 1 << 28
"""Lists of tensors that a kernel works on together are cut to about as much."""

COPY_BYTES = 1 << 26
"""Size of the copy that gives the memory bandwidth: beyond any cache. [64 MiB]"""

OVERHEAD_OPS = 200
"""Length of the chain of tiny ops that gives autograd's own time per node."""

Progress = Callable[[int, int], None]


def measure(
    trace: Trace,
    device: torch.device,
    *,
    progress: Progress | None = None,
    time_budget_s: float = 6.0,
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
        seconds = _time_all(kernels, _Clock(device, room_bytes), progress, time_budget_s, scratch)
    with kept_randomness(device):
        overhead = _node_overhead_s(_Clock(device))
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
    """Runs every different kernel of the smaller batch size once or twice and forgets the times.

    Libraries load their code and take their scratch memory at the first call. Where measurements come from a cache,
    this has not happened yet, and the process's overhead would be read too low.
    """
    with kept_randomness(device), torch.no_grad():
        _time_all(trace.kernels[min(trace.kernels)], _Clock(device), None, 0.0)


@dataclass(frozen=True)
class _Overhead:
    """Seconds that autograd takes for each node of the graph, on top of the kernels."""

    forward_s: float
    backward_s: float


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
    overhead: _Overhead,
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


def _more_s(split: _Split, size: int, phase: int, seconds: Mapping[object, float], overhead: _Overhead) -> float:
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


# -- timing ------------------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds of a call, waiting for the device where it works behind the host's back; copies of arguments may take
    half of ``room_bytes``."""

    def __init__(self, device: torch.device, room_bytes: int = PLENTY_BYTES) -> None:
        self.device = device
        self.room_bytes = room_bytes

    def time_s(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()  # what it returns is freed at once: a step frees, sooner or later, all that it allocates
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3

    def scratch_bytes(self, call: Callable[[], object]) -> int:
        """What a call takes at most beside its result; 0 if that is next to nothing."""
        reset_peak(self.device)
        before = memory_in_use(self.device)
        result = call()
        made = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in tensors_of(result)}
        scratch = peak_memory(self.device) - before - sum(made.values())
        return scratch if scratch >= LEAST_SCRATCH_BYTES else 0


def tensors_of(value: object) -> list[Tensor]:
    """All tensors in a result that may hold any."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _time_all(
    kernels: Iterable[Kernel],
    clock: _Clock,
    progress: Progress | None,
    budget_s: float,
    scratch: dict[object, int] | None = None,
) -> dict[object, float]:
    """Seconds of one call of each different kernel, by its key; ``scratch`` is filled with bytes."""
    unique = {kernel.key: kernel for kernel in kernels}
    seconds: dict[object, float] = {}
    failed: list[Kernel] = []
    deadline = time.perf_counter() + budget_s
    # Cheap ones first: what they leave of their share is for the large ones. An optimizer's at the end, on all ranks
    # at about the same time: they take as long as the memory does, which ranks of one machine share.
    ordered = sorted(unique.values(), key=lambda each: (each.phase == "optimizer", each.num_bytes))
    for done, kernel in enumerate(ordered):
        share = max(0.0, deadline - time.perf_counter()) / (len(unique) - done)
        try:
            if _takes_opaque_state(kernel):
                failed.append(kernel)
            else:
                seconds[kernel.key] = _time(kernel, clock, share, scratch)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            failed.append(kernel)
        if progress is not None:
            progress(done + 1, len(unique))
    unknown = []
    for kernel in failed:
        forward = _forward_of(kernel, unique.values())
        if forward is not None and forward.key in seconds:
            seconds[kernel.key] = _time_after(forward, kernel, clock, scratch) or BACKWARD_RATIO * seconds[forward.key]
        else:
            unknown.append(kernel)
    if unknown:
        _warn_of_estimates(unknown, len(unique))
        bandwidth = _copy_bytes_per_s(clock)
        seconds.update({kernel.key: kernel.num_bytes / bandwidth for kernel in unknown})
    return seconds


def _warn_of_estimates(kernels: list[Kernel], total: int) -> None:
    names = sorted({str(kernel.func) for kernel in kernels})
    warnings.warn(
        f"{len(kernels)} of {total} kernels can't be timed by themselves and are estimated from their bytes: "
        f"{', '.join(names[:5])}",
        OSDPWarning,
        stacklevel=4,
    )


def _takes_opaque_state(kernel: Kernel) -> bool:
    """Whether it reads a buffer that only its forward can write (of cuDNN, oneDNN): made-up bytes would crash it."""
    return any(
        argument.name.lower() in OPAQUE_ARGUMENTS and isinstance(spec, TensorSpec)
        for argument, spec in zip(kernel.func._schema.arguments, kernel.args, strict=False)
    )


def _forward_of(kernel: Kernel, kernels: Iterable[Kernel]) -> Kernel | None:
    """The kernel that ``kernel`` is the backward of: named alike, on the same input."""
    name = kernel.func.overloadpacket.__name__
    forward = name.removesuffix("_backward")
    if forward == name or not kernel.args:
        return None
    alike = (k for k in kernels if k.func.overloadpacket.__name__ == forward and k.args[:1] == kernel.args[:1])
    return next(alike, None)


def _time(kernel: Kernel, clock: _Clock, share_s: float, scratch: dict[object, int] | None = None) -> float:
    """Median seconds of one call, in about ``share_s`` in all, on arguments that are not in the cache."""
    sample = _sample(kernel)
    if sample is not kernel:
        return _time(sample, clock, share_s) * kernel.num_bytes / sample.num_bytes
    args, kwargs = made_up(kernel, clock.device)
    func, start = kernel.func, time.perf_counter()
    first = clock.time_s(lambda: func(*args, **kwargs))
    if scratch is not None and kernel.num_bytes >= LEAST_SCRATCH_BYTES:
        scratch[kernel.key] = clock.scratch_bytes(lambda: func(*args, **kwargs))
    if time.perf_counter() - start > share_s:
        return min(first, clock.time_s(lambda: func(*args, **kwargs)))
    cold_bytes = COLD_STATES_BYTES if kernel.phase == "optimizer" else COLD_BYTES
    copies = min(MAX_COPIES, math.ceil(min(cold_bytes, clock.room_bytes // 2) / max(1, kernel.num_bytes)))
    sets = [(args, kwargs), *(tree_map_only(Tensor, copied, (args, kwargs)) for _ in range(copies - 1))]
    rotation = itertools.cycle(sets)

    def call() -> float:
        positional, named = next(rotation)
        return clock.time_s(lambda: func(*positional, **named))

    for _ in range(WARMUPS):
        call()
    left = share_s - (time.perf_counter() - start)
    return statistics.median(call() for _ in range(max(3, min(MAX_REPEATS, int(left / max(first, 1e-6))))))


def _sample(kernel: Kernel) -> Kernel:
    """A kernel on long lists of tensors (all parameters, in an optimizer's foreach or fused form) on some of them:
    there may be no room for the model once more."""
    every = math.ceil(kernel.num_bytes / LIST_BYTES)
    if every <= 1 or list_length(kernel.func, kernel.args) == 1:
        return kernel
    return replace(kernel, args=some_of_lists(kernel.args, slice(None, None, every)))


def _time_after(
    forward: Kernel, backward: Kernel, clock: _Clock, scratch: dict[object, int] | None = None
) -> float | None:
    """Seconds of a backward that only its forward can prepare, by autograd; None where that does not work."""
    try:
        with torch.enable_grad():
            args, kwargs = made_up(forward, clock.device)
            inputs = [leaf.requires_grad_() for leaf in tensors_of((args, kwargs)) if leaf.is_floating_point()]
            first = next(made for made in tensors_of(forward.func(*args, **kwargs)) if made.requires_grad)
            gradient = torch.ones_like(first)

        def call() -> object:
            return torch.autograd.grad(first, inputs, gradient, retain_graph=True, allow_unused=True)

        call()
        if scratch is not None:
            scratch[backward.key] = clock.scratch_bytes(call)
        return statistics.median(clock.time_s(call) for _ in range(AUTOGRAD_REPEATS))
    except (RuntimeError, StopIteration):
        return None


def _copy_bytes_per_s(clock: _Clock) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / min(clock.time_s(lambda: target.copy_(source)) for _ in range(5))


def _node_overhead_s(clock: _Clock) -> _Overhead:
    """Autograd's own time per node, from a chain of products of two tiny tensors against the same products alone."""
    one = torch.ones(1, device=clock.device)
    leaf = torch.ones(1, device=clock.device, requires_grad=True)

    def chain(value: Tensor) -> Tensor:
        for _ in range(OVERHEAD_OPS):
            value = aten.neg.default(value)
        return value

    forwards, backwards, alone = [], [], []
    for _ in range(WARMUPS + MAX_REPEATS):
        alone.append(clock.time_s(lambda: chain(one)))
        ends: list[Tensor] = []
        forwards.append(clock.time_s(lambda: ends.append(chain(leaf))))  # noqa: B023
        backwards.append(clock.time_s(lambda: torch.autograd.grad(ends[0], leaf)))  # noqa: B023
    plain = statistics.median(alone)
    return _Overhead(
        forward_s=max(0.0, statistics.median(forwards) - plain) / OVERHEAD_OPS,
        backward_s=max(0.0, statistics.median(backwards) - plain) / OVERHEAD_OPS,
    )
