"""Which kernels are timed, how often, and how their times add up. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cluster import Scratch
from lightning_osdp.planning.operators import OUTSIDE, Line
from lightning_osdp.planning.rehearsed import rising
from lightning_osdp.profiling import arguments, compute, timing
from lightning_osdp.profiling.compute import measure, measure_share, warm_up
from lightning_osdp.profiling.heap import fix_cpu_allocator
from lightning_osdp.profiling.kernels import Kernel, KernelPhase, TensorSpec, spec_of
from lightning_osdp.profiling.memory import release_unused
from lightning_osdp.profiling.trace import Trace, trace
from tests.planning.small import blocks_of_one
from tests.planning.small import compute as times_of
from tests.profiling.models import Regression, TinyGPT, tokens

CPU = torch.device("cpu")
aten = torch.ops.aten


def traced(layers: int = 1) -> Trace:
    return trace(TinyGPT(layers), tokens(), 4, device=CPU)


def test_views_are_no_kernels_and_products_are() -> None:
    found = trace(Regression(nn.Linear(8, 8)), torch.ones(4, 8), 4, device=CPU).kernels[2]
    funcs = {kernel.func for kernel in found}
    assert aten.addmm.default in funcs
    assert not funcs & {aten.t.default, aten.view.default, aten.detach.default, aten.expand.default}
    (product,) = [kernel for kernel in found if kernel.func is aten.addmm.default]
    assert (product.operator, product.phase, product.count) == (0, "forward", 1)
    assert product.args[1] == TensorSpec((2, 8), (8, 1), torch.float32)


def test_identical_operators_share_their_kernels() -> None:
    """A deeper model of the same blocks has more kernels to count and not one more to time."""
    shallow, deep = traced(1), traced(3)
    assert {k.key for k in deep.kernels[2]} == {k.key for k in shallow.kernels[2]}
    assert len(deep.kernels[2]) > len(shallow.kernels[2])


def test_every_different_kernel_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced()
    times: list[Kernel] = []

    def count(kernel: Kernel, clock: object, share_s: float, scratch: object) -> float:
        times.append(kernel)
        return 1.0

    monkeypatch.setattr(timing, "_time", count)
    monkeypatch.setattr(compute, "node_overhead", lambda clock: timing.Overhead(0.0, 0.0))
    steps: list[tuple[int, int]] = []
    result = measure(found, CPU, progress=lambda done, total: steps.append((done, total)))
    everything = [*found.kernels[2], *found.kernels[8], *found.optimizer_kernels]
    assert len(times) == len({kernel.key for kernel in everything}) == steps[-1][0] == steps[-1][1]
    calls = sum(kernel.count for kernel in found.kernels[8])
    predicted = sum(operator.at(8) for operator in result.operators) + result.outside.at(8)
    assert predicted == pytest.approx(calls)
    trainable = sum(p.gradient_bytes for operator in found.description.operators for p in operator.parameters)
    assert result.optimizer_s_per_byte * trainable == pytest.approx(sum(k.count for k in found.optimizer_kernels))


def test_ranks_that_share_the_work_know_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of the step is timed by one of them, the optimizer's by all; what one can't time, all try again."""
    found, times = traced(), list[Kernel]()
    timed_ones = {kernel.name for kernel in (*found.kernels[2], *found.kernels[8])}
    broken = min(timed_ones)

    def count(kernel: Kernel, clock: object, share_s: float, scratch: dict[object, int]) -> float:
        if kernel.name == broken and shares is None:
            raise RuntimeError("not here")
        times.append(kernel)
        scratch[kernel.key] = 5
        return float(kernel.num_bytes)

    monkeypatch.setattr(timing, "_time", count)
    monkeypatch.setattr(compute, "node_overhead", lambda clock: timing.Overhead(0.0, 0.0))
    shares = None
    wanted = [measure_share(found, CPU, place, 3) for place in range(3)]
    assert sorted(name for share in wanted for name in share.seconds) == sorted(timed_ones - {broken})
    assert max(len(share.seconds) for share in wanted) - min(len(share.seconds) for share in wanted) <= 2
    times.clear()
    shares = wanted
    together = measure(found, CPU, shares=shares)
    assert {kernel.name for kernel in times if kernel.phase != "optimizer"} == {broken}
    assert {kernel.phase for kernel in times} >= {"optimizer"}
    assert together == measure(found, CPU)


def test_a_kernels_name_is_the_same_in_every_process() -> None:
    one, other = (Kernel(aten.neg.default, (TensorSpec((rows,), (1,), torch.float32),)) for rows in (2, 3))
    assert one.name != other.name
    assert one.name == Kernel(aten.neg.default, one.args, operator=3, count=2).name == "c7ba0b03c874004f"


def test_measured_times_are_aligned_and_never_negative() -> None:
    found = traced()
    before = torch.get_rng_state()
    result = measure(found, CPU, time_budget_s=1.0)
    assert torch.equal(before, torch.get_rng_state())
    assert len(result.operators) == len(found.description.operators)
    for each in (*result.operators, result.outside):
        for part in (each.forward, each.backward):
            assert part.fixed >= 0
            assert part.per_sample >= 0
            assert part.at(4) > 0
    assert result.optimizer_s_per_byte > 0


def test_all_kernels_of_common_layers_run_by_themselves(recwarn: pytest.WarningsRecorder) -> None:
    nets = [
        (nn.LSTM(8, 6, batch_first=True), (4, 5, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (4, 3, 8, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 5, 8)),
    ]
    for net, shape in nets:
        measure(trace(Regression(net), torch.ones(shape), 4, device=CPU), CPU, time_budget_s=0.1)
    assert [str(warning.message) for warning in recwarn if issubclass(warning.category, OSDPWarning)] == []


def test_a_backward_that_only_its_forward_can_prepare_runs_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    # How much oneDNN takes there depends on the processor, and on what it has kept from earlier calls.
    monkeypatch.setattr(timing.Clock, "time_and_scratch", lambda clock, call: (1.0, 9 << 20 if call() else 0))
    net = trace(Regression(nn.LSTM(512, 512, batch_first=True)), torch.ones(4, 8, 512), 4, device=CPU)
    (scratch,) = measure(net, CPU, time_budget_s=0.1).scratch
    assert scratch.backward.at(2) == 9 << 20
    monkeypatch.setattr(timing, "_time_after", lambda *_: None)
    estimated = measure(net, CPU, time_budget_s=0.1)
    assert estimated.scratch[0].backward.at(2) == 0
    (time,) = estimated.operators
    assert time.backward.at(2) > time.forward.at(2)  # where that is not possible, a multiple of the forward's


class Seen(TorchDispatchMode):
    """What was called, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[object] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def test_warming_up_runs_each_kernel_of_the_larger_batch_size_once() -> None:
    found = traced(3)
    with Seen() as seen:
        warm_up(found, CPU)
    times = Counter(key[0] for key in {kernel.key for kernel in found.kernels[8]})
    made_of = {aten.randn.default, aten.abs_.default, aten.mul.Tensor, aten.randint.low, aten.repeat.default}
    assert {func: seen.calls[func] for func in times if func not in made_of} == {
        func: count for func, count in times.items() if func not in made_of
    }


def test_warming_up_passes_over_what_refuses_made_up_arguments() -> None:
    lstm = trace(Regression(nn.LSTM(8, 6, batch_first=True)), torch.ones(4, 5, 8), 4, device=CPU)
    (backward,) = [kernel for kernel in lstm.kernels[2] if timing._takes_opaque_state(kernel)]
    with Seen() as seen:
        warm_up(lstm, CPU)
    assert seen.calls[backward.func] > 0  # after its forward, which alone can prepare it
    broken = Kernel(aten.mm.default, (spec_of(torch.ones(2, 3)), spec_of(torch.ones(2, 3))))
    good = Kernel(aten.neg.default, (spec_of(torch.ones(2, 3)),))
    with Seen() as seen:
        warm_up(Trace(lstm.description, {2: (broken, good)}, ()), CPU)
    assert seen.calls[aten.neg.default] == 1


@pytest.mark.parametrize(
    ("phase", "room_mib", "sets"),
    [("forward", 1 << 20, 8), ("optimizer", 1 << 20, 16), ("optimizer", 16, 2), ("forward", 0, 1)],
)
def test_arguments_are_copied_until_they_have_left_the_cache_if_there_is_room(
    phase: KernelPhase, room_mib: int, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(timing, "copied", lambda tensor: made.append(tensor) or tensor)
    four_mib = TensorSpec((1 << 20,), (1,), torch.float32)
    kernel = Kernel(aten.neg.default, (four_mib,), phase=phase)
    assert timing._time(kernel, timing.Clock(CPU, room_mib << 20), share_s=60.0) > 0
    assert len(made) == sets - 1


def test_copies_are_counted_with_all_that_their_storages_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(timing, "copied", lambda tensor: made.append(tensor) or tensor)
    part_of_four_mib = TensorSpec((1024, 64), (1024, 1), torch.float32)
    kernel = Kernel(aten.neg.default, (part_of_four_mib,))
    timing._time(kernel, timing.Clock(CPU), share_s=60.0)
    assert len(made) == 15  # it reads 256 KiB: all copies that there may be
    made.clear()
    timing._time(kernel, timing.Clock(CPU, 40 << 20), share_s=60.0)
    assert len(made) == 4  # five times 4 MiB are half of the room, but for what rows leave at the end


def test_lists_are_cut_to_the_room_that_there_is() -> None:
    mib = TensorSpec((1 << 18,), (1,), torch.float32)
    kernel = Kernel(aten._foreach_neg.default, ((mib,) * 12,), phase="optimizer")
    assert timing._sample(kernel) is kernel
    cut = timing._sample(kernel, 8 << 20)
    assert len(cut.args[0]) == 4  # type: ignore[arg-type]
    assert len(timing._sample(kernel, 0).args[0]) == 1  # type: ignore[arg-type]


def test_where_one_tensor_is_larger_than_the_room_some_of_its_rows_are_stepped() -> None:
    weight, bias = TensorSpec((512, 512), (512, 1), torch.float32), TensorSpec((512,), (1,), torch.float32)
    of_one = Kernel(aten._foreach_add.List, ((weight,), (weight,)), phase="optimizer")  # 2 MiB
    (first,), (second,) = timing._sample(of_one, 1 << 20).args
    assert first == second == TensorSpec((128, 512), (512, 1), torch.float32)
    # Of unequal ones those that there is room for, whichever they are.
    several = Kernel(aten._foreach_neg.default, ((weight, bias, weight, bias),), phase="optimizer")
    assert timing._sample(several, 2 << 20).args == ((weight,),)
    assert timing._sample(several, 1 << 20).args == ((bias,),)


def test_kernel_that_cannot_run_alone_is_estimated_with_one_warning() -> None:
    broken = Kernel(aten.mm.default, (spec_of(torch.ones(2, 3)), spec_of(torch.ones(2, 3))), (), OUTSIDE, "forward")
    good = traced()
    found = Trace(good.description, {2: (broken,)}, ())
    with pytest.warns(OSDPWarning, match="1 of 1 kernels") as caught:
        result = measure(found, CPU)
    assert len(caught) == 1
    assert 0 < result.outside.forward.at(2) < 1


@pytest.mark.parametrize(
    ("points", "fixed", "per_sample"),
    [
        ([(2, 3.0), (8, 9.0)], 1.0, 1.0),
        ([(2, 4.0), (8, 2.0)], 3.0, 0.0),
        ([(1, 0.0), (3, 10.0)], 0.0, 3.0),
        ([(4, 5.0)], 5.0, 0.0),
    ],
    ids=["rising", "falling", "negative intercept", "one size"],
)
def test_lines_have_neither_slope_nor_intercept_below_zero(
    points: list[tuple[int, float]], fixed: float, per_sample: float
) -> None:
    line = rising(points)
    assert (line.fixed, line.per_sample) == (pytest.approx(fixed), pytest.approx(per_sample))


def test_made_up_arguments_have_the_strides_and_the_range_that_the_kernel_needs() -> None:
    table, index = torch.ones(50, 4), torch.zeros(3, 2, dtype=torch.long)
    kernel = Kernel(aten.embedding.default, (spec_of(table), spec_of(index.t())))
    args, _ = arguments.made_up(kernel, CPU)
    assert args[1].stride() == index.t().stride()
    assert 0 <= int(args[1].min()) <= int(args[1].max()) < 50
    expanded = arguments._tensor(TensorSpec((5, 4), (0, 1), torch.float32), 1, CPU)
    assert expanded.untyped_storage().nbytes() == 16
    assert torch.equal(arguments.copied(expanded), expanded)
    assert arguments.copied(expanded).data_ptr() != expanded.data_ptr()


def test_scratch_is_what_a_call_takes_beside_its_result() -> None:
    fix_cpu_allocator()
    release_unused(CPU)  # a hole that other tests have left in the heap would take the tensor, and nothing be new
    clock, elements = timing.Clock(CPU), 8 << 20
    clock.time_and_scratch(lambda: torch.ones(elements))
    assert clock.time_and_scratch(lambda: torch.ones(elements))[1] == 0
    _, inside = clock.time_and_scratch(lambda: torch.ones(elements).sum())
    assert 4 * elements <= inside + timing.LEAST_SCRATCH_BYTES < 4.5 * elements


def test_scratch_counts_at_its_operators_moments() -> None:
    model = blocks_of_one(2, 1)
    times = times_of(model)
    assert times.with_scratch(model) == model
    some = Scratch(forward=Line(fixed=5.0), backward=Line(per_sample=7.0))
    found = times.model_copy(update={"scratch": (Scratch(), some)}).with_scratch(model)
    for before, after in zip(model.moments, found.moments, strict=True):
        more = after.live.at(3) - before.live.at(3)
        assert more == (0 if before.operator != 1 else 5 if before.phase == "forward" else 21)


def test_long_lists_are_timed_in_part_and_no_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an optimizer's lists may be cut: one index less would make another kernel."""
    monkeypatch.setattr(timing, "LIST_BYTES", 1000)
    spec = TensorSpec((100,), (1,), torch.float32)
    many = Kernel(aten._foreach_add_.List, ((spec,) * 10, (spec,) * 10))
    assert timing._sample(many).args == ((spec,), (spec,))
    places = TensorSpec((100,), (1,), torch.int64)
    for whole in (Kernel(aten.index.Tensor, (spec, (places, places))), Kernel(aten.cat.default, ((spec,) * 10,))):
        assert timing._sample(whole) is whole


def test_what_is_timed_of_long_lists_is_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and biases take turns: every second or fourth tensor would be biases alone."""
    weight, bias = (TensorSpec((size,), (1,), torch.float32) for size in (1000, 10))
    kernel = Kernel(aten._foreach_add_.List, ((weight, bias) * 20, (weight, bias) * 20))
    for every in (2, 4):
        monkeypatch.setattr(timing, "LIST_BYTES", math.ceil(kernel.num_bytes / every))
        sample = timing._sample(kernel)
        assert sample.args == ((bias,) * (20 // every) + (weight,) * (20 // every),) * 2
