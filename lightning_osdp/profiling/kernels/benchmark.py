"""Times kernels one by one on synthetic arguments, with cold caches as in a training step.

Only one kernel's arguments are in memory at a time, so a model that does not fit can be measured.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_osdp.backend.memory import memory_in_use, peak_memory, reset_peak
from lightning_osdp.backend.timer import CORE_SHARING, elapsed_s, record_event, synchronize, typical_time_s
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.profiling.kernels import kernel as kernel_lists
from lightning_osdp.profiling.kernels.kernel import Kernel, TensorSpec
from lightning_osdp.profiling.kernels.synthetic_args import clone_with_strides, make_arguments

aten = torch.ops.aten
log = logging.getLogger(__name__)

WARMUP_REPEATS = 2
"""Untimed runs of a kernel, in which the allocator and the libraries' plans settle."""

MIN_REPEATS, MAX_REPEATS = 3, 15
"""Timed runs of a kernel, of which the typical one counts. Where there is no time for them, it is run twice."""

MIN_OPTIMIZER_KERNEL_S = 0.06
"""Least time for a kernel of an optimizer: they are few, come last, and no trial of a whole step corrects them."""

AUTOGRAD_REPEATS = 5
"""Timed runs of a backward that is run by autograd."""

COLD_BYTES, COLD_OPTIMIZER_BYTES = 1 << 25, 1 << 26
"""Bytes of argument copies that are used in turn, so that none is in the cache: of kernels, of optimizers' kernels
(a step has gone through the whole model when it comes to a parameter again). [M-kernels-1]"""

MAX_COPIES = 16
"""Largest number of copies of a kernel's arguments."""

MATMULS = (aten.mm.default, aten.addmm.default, aten.addmm_.default)
CPU_ATTENTIONS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Kernels whose time is that of their FLOPs."""

CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
"""Kernels whose library takes a workspace of a size that their arguments do not tell."""

MAX_FLOPS, SAMPLE_FLOPS = 1e10, 5e9
"""FLOPs beyond which such a kernel is timed on a CPU by a smaller one, and that one's: a core makes some 1e11 in a
second, and the products of a model of 7 B parameters have up to 5e12."""

UNLIMITED_BYTES = 1 << 60
"""Available memory where it is unknown."""

MIN_WORKSPACE_BYTES = 1 << 20
"""Smallest workspace that is measured: the process's own counters move by as much."""

OPAQUE_ARGUMENTS = frozenset({"workspace", "reserve", "reservespace"})
"""Names in aten's schemas of buffers that a library's forward leaves to its backward."""

BACKWARD_RATIO = 2.0
"""Time of a backward that can't be run, relative to its forward: two matrix products for each one there."""

MAX_LIST_BYTES = 1 << 28
"""Bytes to which lists of tensors are cut that one kernel works on."""

COPY_BYTES = 1 << 26
"""Size of the copy that shows the memory bandwidth, beyond any cache."""

OVERHEAD_OPS = 200
"""Length of the chain of tiny ops that shows autograd's own time per node."""

UNRUNNABLE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""Errors that kernels raise for synthetic arguments that they don't accept."""


class KernelTime(NamedTuple):
    """Seconds of one call of a kernel, and the bytes that it takes on top of arguments and results."""

    seconds: float
    workspace_bytes: int = 0


KernelTimes = dict[str, KernelTime]
"""Times by the names of kernels, which are the same in every process."""


class AutogradOverhead(NamedTuple):
    """Seconds that autograd takes for each node of the graph, on top of the kernels."""

    forward_s: float
    backward_s: float


class Clock:
    """Times calls on a device, and waits for it where it works asynchronously.

    Attributes:
        device: The device.
        available_bytes: Free memory, half of which copies of a kernel's arguments may take.
    """

    def __init__(self, device: torch.device, available_bytes: int = UNLIMITED_BYTES) -> None:
        self.device = device
        self.available_bytes = available_bytes

    def time_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call."""
        synchronize(self.device)
        start = record_event(self.device)
        call()  # The result is freed at once: a step frees, sooner or later, all that it allocates.
        return elapsed_s(start, record_event(self.device))

    def measure_time_and_workspace(self, call: Callable[[], object]) -> KernelTime:
        """Return the seconds of one call and its peak of bytes on top of its result, 0 if negligible."""
        results: list[object] = []
        reset_peak(self.device)
        before = memory_in_use(self.device)
        seconds = self.time_s(lambda: results.append(call()))
        storages = [leaf.untyped_storage() for leaf in tensors_of(results)]
        result_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        workspace = peak_memory(self.device) - before - result_bytes
        return KernelTime(seconds, workspace if workspace >= MIN_WORKSPACE_BYTES else 0)


def tensors_of(value: object) -> list[Tensor]:
    """Return all tensors in a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_all(kernels: Iterable[Kernel], device: torch.device) -> None:
    """Run each distinct kernel once, as far as it can be run by itself or after its forward."""
    unique = {kernel.key: kernel for kernel in kernels}.values()
    for kernel in unique:
        if _has_opaque_state(kernel):
            forward = _find_forward(kernel, unique)
            if forward is not None:
                _time_via_autograd(forward, Clock(device))
            continue
        with suppress(*UNRUNNABLE_ERRORS):
            args, kwargs = make_arguments(_sample(kernel), device)
            kernel.func(*args, **kwargs)


def order_for_timing(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return distinct kernels in the order to time them, the same on all ranks.

    Cheap kernels come first and leave the rest of their time to the large ones. An optimizer's come at the end, for
    all ranks to time at about the same moment: they are bound by the memory that ranks of one machine share.
    """
    unique = {kernel.name: kernel for kernel in kernels}.values()
    return sorted(unique, key=lambda kernel: (kernel.phase == "optimizer", kernel.num_bytes, kernel.name))


def time_within_budget(kernels: Sequence[Kernel], clock: Clock, budget_s: float) -> tuple[KernelTimes, list[Kernel]]:
    """Time ``kernels`` in their order and in about ``budget_s`` seconds.

    Returns:
        The times, and the kernels that can't be run by themselves.
    """
    times: KernelTimes = {}
    unrunnable: list[Kernel] = []
    start = time.perf_counter()
    for index, kernel in enumerate(kernels):
        share_s = max(0.0, start + budget_s - time.perf_counter()) / (len(kernels) - index)
        if kernel.phase == "optimizer":
            share_s = max(share_s, MIN_OPTIMIZER_KERNEL_S)
        if not _has_opaque_state(kernel):
            with suppress(*UNRUNNABLE_ERRORS):
                times[kernel.name] = _time(kernel, clock, share_s)
        if kernel.name not in times:
            unrunnable.append(kernel)
    log.debug("timed %d kernels of %d in %.1f s", len(times), len(kernels), time.perf_counter() - start)
    return times, unrunnable


def time_all(kernels: Iterable[Kernel], clock: Clock, budget_s: float, known: KernelTimes) -> KernelTimes:
    """Return the times of all distinct ``kernels``, of which those in ``known`` are not timed again."""
    ordered = order_for_timing(kernels)
    times, unrunnable = time_within_budget([k for k in ordered if k.name not in known], clock, budget_s)
    times = known | times
    return times | _estimate_unrunnable(unrunnable, ordered, times, clock)


def _estimate_unrunnable(
    unrunnable: Sequence[Kernel], kernels: Collection[Kernel], times: Mapping[str, KernelTime], clock: Clock
) -> KernelTimes:
    """Time kernels by autograd after their forwards, or estimate them by their forwards' times or their bytes."""
    estimates: KernelTimes = {}
    unknown = []
    for kernel in unrunnable:
        forward = _find_forward(kernel, kernels)
        if forward is not None and forward.name in times:
            timed = _time_via_autograd(forward, clock)
            estimated = KernelTime(BACKWARD_RATIO * times[forward.name].seconds)
            estimates[kernel.name] = timed if timed is not None and timed.seconds else estimated
        else:
            unknown.append(kernel)
    if unknown:
        names = sorted({str(kernel.func) for kernel in unknown})
        warnings.warn(
            f"{len(unknown)} of {len(kernels)} kernels can't be timed by themselves and are estimated from their "
            f"bytes: {', '.join(names[:5])}",
            OSDPWarning,
            stacklevel=4,
        )
        bandwidth = _copy_bytes_per_s(clock)
        estimates |= {kernel.name: KernelTime(kernel.num_bytes / bandwidth) for kernel in unknown}
    return estimates


def _has_opaque_state(kernel: Kernel) -> bool:
    """Return whether it reads a buffer that only its forward can write (cuDNN, oneDNN): other bytes would crash it."""
    return any(
        argument.name.lower() in OPAQUE_ARGUMENTS and isinstance(spec, TensorSpec)
        for argument, spec in zip(kernel.func._schema.arguments, kernel.args, strict=False)
    )


def _find_forward(kernel: Kernel, kernels: Iterable[Kernel]) -> Kernel | None:
    """Return the kernel that ``kernel`` is the backward of: the one with that name and the same input."""
    name = kernel.func.overloadpacket.__name__
    forward = name.removesuffix("_backward")
    if forward == name or not kernel.args:
        return None
    matches = (k for k in kernels if k.func.overloadpacket.__name__ == forward and k.args[:1] == kernel.args[:1])
    return next(matches, None)


def _time(kernel: Kernel, clock: Clock, budget_s: float) -> KernelTime:
    """Return the typical time of one call on arguments that are not in the cache, in about ``budget_s`` in all."""
    sample = _sample(kernel, clock.available_bytes)
    if sample is not kernel:
        return KernelTime(_time(sample, clock, budget_s).seconds * kernel.num_bytes / sample.num_bytes)
    sample = sample_flops(kernel) if clock.device.type == "cpu" else kernel
    if sample is not kernel:
        timed, factor = _time(sample, clock, budget_s), kernel_flops(kernel) / kernel_flops(sample)
        return KernelTime(timed.seconds * factor, int(timed.workspace_bytes * factor))
    start = time.perf_counter()
    args, kwargs = make_arguments(kernel, clock.device)
    first_s = clock.time_s(lambda: kernel.func(*args, **kwargs))
    if _may_take_workspace(kernel, clock.device):
        second_s, workspace = clock.measure_time_and_workspace(lambda: kernel.func(*args, **kwargs))
    else:
        second_s, workspace = clock.time_s(lambda: kernel.func(*args, **kwargs)), 0
    if time.perf_counter() - start + (WARMUP_REPEATS + MIN_REPEATS) * second_s > budget_s:
        return KernelTime(second_s if CORE_SHARING.is_shared else min(first_s, second_s), workspace)
    copies = (
        tree_map_only(Tensor, clone_with_strides, (args, kwargs))
        for _ in range(_num_copies(kernel, (args, kwargs), clock))
    )
    rotation = itertools.cycle([(args, kwargs), *copies])

    def time_next_s() -> float:
        positional, named = next(rotation)
        return clock.time_s(lambda: kernel.func(*positional, **named))

    for _ in range(WARMUP_REPEATS):
        time_next_s()
    remaining_s = budget_s - (time.perf_counter() - start)
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(remaining_s / max(second_s, 1e-6))))
    return KernelTime(typical_time_s([time_next_s() for _ in range(repeats)]), workspace)


def _may_take_workspace(kernel: Kernel, device: torch.device) -> bool:
    """Return whether a kernel may take a workspace that can be measured; on a CPU each measurement takes milliseconds.

    Few kernels take more than their arguments. A depthwise convolution's backward takes hundreds of times as much.
    """
    is_convolution = kernel.func.overloadpacket in CONVOLUTIONS
    return device.type == "cuda" or is_convolution or kernel.num_bytes >= MIN_WORKSPACE_BYTES


def _num_copies(kernel: Kernel, arguments: object, clock: Clock) -> int:
    """Return how many further copies of a kernel's arguments exceed the cache, as far as memory allows.

    Whole storages count: those of strided tensors are larger than what a kernel reads of them.
    """
    cold_bytes = COLD_OPTIMIZER_BYTES if kernel.phase == "optimizer" else COLD_BYTES
    if clock.device.type == "cuda":
        cold_bytes = max(cold_bytes, 2 * torch.cuda.get_device_properties(clock.device).L2_cache_size)
    storage_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(arguments))
    affordable = clock.available_bytes // 2 // max(1, storage_bytes)
    return min(MAX_COPIES, math.ceil(cold_bytes / max(1, kernel.num_bytes)), max(1, affordable)) - 1


def _sample(kernel: Kernel, available_bytes: int = UNLIMITED_BYTES) -> Kernel:
    """Return an optimizer's foreach or fused kernel on some of its tensors, where all may not fit memory once more.

    The sample takes every n-th tensor by size, so that it has small and large ones. [M-kernels-2] It is the largest
    that fits; where each tensor alone is too large, it has some rows of the smallest. Other kernels stay whole.
    """
    max_bytes = max(1, min(MAX_LIST_BYTES, available_bytes // 2))
    divisor = math.ceil(kernel.num_bytes / max_bytes)
    if divisor <= 1 or not kernel_lists.is_foreach_or_fused(kernel.func):
        return kernel
    order = kernel_lists.argsort_by_size(kernel.args)
    subsets = (order[start::divisor] for start in range(min(divisor, len(order))))
    samples = [replace(kernel, args=kernel_lists.select_from_lists(kernel.args, subset)) for subset in subsets]
    fitting = [sample for sample in samples if sample.num_bytes <= max_bytes]
    if fitting:
        return max(fitting, key=lambda sample: sample.num_bytes)
    smallest = min(samples, key=lambda sample: sample.num_bytes)
    row_divisor = math.ceil(smallest.num_bytes / max_bytes)
    return replace(smallest, args=tuple(kernel_lists.sample_rows(arg, row_divisor) for arg in smallest.args))


def kernel_flops(kernel: Kernel) -> float:
    """Return the FLOPs of a product of two matrices or of an attention's forward; 0 of any other kernel."""
    if kernel.func in MATMULS:
        left, right = (spec for spec in kernel.args[-2:] if isinstance(spec, TensorSpec))
        return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
    if kernel.func in CPU_ATTENTIONS:
        shapes = {spec.shape for spec in kernel.args[:3] if isinstance(spec, TensorSpec)}
        if len(shapes) == 1:  # as many heads of keys as of queries, and as many tokens
            samples, heads, tokens, width = shapes.pop()
            return 4.0 * samples * heads * tokens**2 * width
    return 0.0


def sample_flops(kernel: Kernel) -> Kernel:
    """Return a kernel of at most ``SAMPLE_FLOPS`` or so in the place of one with more than ``MAX_FLOPS``.

    Matrices keep their proportions, an attention has fewer samples and heads.
    """
    flops = kernel_flops(kernel)
    if flops <= MAX_FLOPS:
        return kernel
    shrink = SAMPLE_FLOPS / flops
    if kernel.func in MATMULS:
        return _resize(kernel, lambda shape: tuple(min(n, max(64, round(n * shrink ** (1 / 3)))) for n in shape))
    query = kernel.args[0]
    assert isinstance(query, TensorSpec)
    samples, heads = query.shape[:2]
    fewer_samples = max(1, round(samples * shrink))
    fewer = {0: {samples: fewer_samples}, 1: {heads: max(1, round(heads * shrink * samples / fewer_samples))}}
    return _resize(kernel, lambda shape: tuple(fewer.get(dim, {}).get(n, n) for dim, n in enumerate(shape)))


def _resize(kernel: Kernel, resize: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Kernel:
    """Return a kernel whose tensors have other sizes, and their dimensions in the same order in memory."""

    def resized(spec: object) -> object:
        if not isinstance(spec, TensorSpec):
            return spec
        shape, strides, step = resize(spec.shape), [0] * len(spec.shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim)):
            if spec.stride[dim]:
                strides[dim], step = step, step * shape[dim]
        return TensorSpec(shape, tuple(strides), spec.dtype)

    kwargs = tuple((name, resized(value)) for name, value in kernel.kwargs)
    return replace(kernel, args=tuple(map(resized, kernel.args)), kwargs=kwargs)


def _time_via_autograd(forward: Kernel, clock: Clock) -> KernelTime | None:
    """Time the backward of ``forward`` by autograd; None where that does not work."""
    try:
        with torch.enable_grad():
            args, kwargs = make_arguments(forward, clock.device)
            inputs = [leaf.requires_grad_() for leaf in tensors_of((args, kwargs)) if leaf.is_floating_point()]
            output = next(result for result in tensors_of(forward.func(*args, **kwargs)) if result.requires_grad)
            gradient = torch.ones_like(output)

        def call() -> object:
            return torch.autograd.grad(output, inputs, gradient, retain_graph=True, allow_unused=True)

        call()
        _, workspace = clock.measure_time_and_workspace(call)
        return KernelTime(typical_time_s([clock.time_s(call) for _ in range(AUTOGRAD_REPEATS)]), workspace)
    except (RuntimeError, StopIteration):
        return None


def _copy_bytes_per_s(clock: Clock) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / min(clock.time_s(lambda: target.copy_(source)) for _ in range(5))


def measure_autograd_overhead(clock: Clock) -> AutogradOverhead:
    """Return autograd's own time per node: that of a chain of tiny ops with autograd, less that without."""

    def chain(value: Tensor) -> Tensor:
        for _ in range(OVERHEAD_OPS):
            value = aten.neg.default(value)
        return value

    constant = torch.ones(1, device=clock.device)
    leaf = torch.ones(1, device=clock.device, requires_grad=True)
    plain, forward, backward = [], [], []
    for _ in range(WARMUP_REPEATS + MAX_REPEATS):
        plain.append(clock.time_s(lambda: chain(constant)))
        outputs: list[Tensor] = []
        forward.append(clock.time_s(lambda: outputs.append(chain(leaf))))  # noqa: B023
        backward.append(clock.time_s(lambda: torch.autograd.grad(outputs[0], leaf)))  # noqa: B023
    plain_s, forward_s, backward_s = map(statistics.median, (plain, forward, backward))
    return AutogradOverhead(
        forward_s=max(0.0, forward_s - plain_s) / OVERHEAD_OPS, backward_s=max(0.0, backward_s - plain_s) / OVERHEAD_OPS
    )
