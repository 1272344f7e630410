"""Which kernels are timed, how often, and how their times add up. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_osdp.backend.cpu.malloc import configure_cpu_allocator
from lightning_osdp.backend.memory import trim
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.trial_correction import fit_nonnegative_line
from lightning_osdp.planning.spec.cluster import KernelWorkspace, OperatorTime
from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, Operator, ParameterInfo
from lightning_osdp.planning.spec.tensor import TensorRole, TensorUse
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.compute import measure_compute, measure_partition, warm_up
from lightning_osdp.profiling.kernels import benchmark, synthetic_args
from lightning_osdp.profiling.kernels.kernel import Kernel, KernelPhase, TensorSpec, spec_of, tensor_specs
from lightning_osdp.profiling.kernels.lookup_gradients import limit_growth
from lightning_osdp.profiling.tracing.trace import TracedStep
from tests.support.small_models import blocks_of_one
from tests.support.small_models import compute as times_of
from tests.support.traced_models import Regression, TinyGPT, tokens, trace

CPU = torch.device("cpu")
aten = torch.ops.aten


def trace_tiny_gpt(layers: int = 1) -> TracedStep:
    return trace(TinyGPT(layers), tokens(), 4, device=CPU)


def test_trace_kernels_include_matmuls_and_no_views() -> None:
    found = trace(Regression(nn.Linear(8, 8)), torch.ones(4, 8), 4, device=CPU).kernels[2]
    funcs = {kernel.func for kernel in found}
    assert aten.addmm.default in funcs
    assert not funcs & {aten.t.default, aten.view.default, aten.detach.default, aten.expand.default}
    (product,) = [kernel for kernel in found if kernel.func is aten.addmm.default]
    assert (product.operator, product.phase, product.count) == (0, "forward", 1)
    assert product.args[1] == TensorSpec((2, 8), (8, 1), torch.float32)


def test_trace_kernels_are_shared_by_identical_operators() -> None:
    """A deeper model of the same blocks has more kernels to count and not one more to time."""
    shallow, deep = trace_tiny_gpt(1), trace_tiny_gpt(3)
    assert {k.key for k in deep.kernels[2]} == {k.key for k in shallow.kernels[2]}
    assert len(deep.kernels[2]) > len(shallow.kernels[2])


def test_measure_compute_times_each_distinct_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trace_tiny_gpt()
    times: list[Kernel] = []

    def count(kernel: Kernel, clock: object, share_s: float) -> benchmark.KernelTime:
        times.append(kernel)
        return benchmark.KernelTime(1.0)

    monkeypatch.setattr(benchmark, "_time", count)
    monkeypatch.setattr(compute, "measure_autograd_overhead", lambda clock: benchmark.AutogradOverhead(0.0, 0.0))
    result = measure_compute(found, CPU)
    everything = [*found.kernels[2], *found.kernels[8], *found.optimizer_kernels]
    assert len(times) == len({kernel.key for kernel in everything})
    calls = sum(kernel.count for kernel in found.kernels[8])
    predicted = sum(operator.seconds_at(8) for operator in result.operators) + result.unattributed.seconds_at(8)
    assert predicted == pytest.approx(calls)
    trainable = sum(p.gradient_bytes for operator in found.model_profile.operators for p in operator.parameters)
    assert result.optimizer_s_per_byte * trainable == pytest.approx(sum(k.count for k in found.optimizer_kernels))


def test_measure_partition_of_all_ranks_covers_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of the step is timed by one of them, the optimizer's by all; what one can't time, all try again."""
    found, times = trace_tiny_gpt(), list[Kernel]()
    timed_ones = {kernel.name for kernel in (*found.kernels[2], *found.kernels[8])}
    broken = min(timed_ones)

    def count(kernel: Kernel, clock: object, share_s: float) -> benchmark.KernelTime:
        if kernel.name == broken and shares is None:
            raise RuntimeError("not here")
        times.append(kernel)
        return benchmark.KernelTime(float(kernel.num_bytes), 5)

    monkeypatch.setattr(benchmark, "_time", count)
    monkeypatch.setattr(compute, "measure_autograd_overhead", lambda clock: benchmark.AutogradOverhead(0.0, 0.0))
    shares = None
    wanted = [measure_partition(found, CPU, place, 3) for place in range(3)]
    assert sorted(name for share in wanted for name in share) == sorted(timed_ones - {broken})
    assert max(len(share) for share in wanted) - min(len(share) for share in wanted) <= 2
    times.clear()
    shares = wanted
    together = measure_compute(found, CPU, partitions=shares)
    assert {kernel.name for kernel in times if kernel.phase != "optimizer"} == {broken}
    assert {kernel.phase for kernel in times} >= {"optimizer"}
    assert together == measure_compute(found, CPU)


def test_kernel_name_is_the_same_in_every_process() -> None:
    one, other = (Kernel(aten.neg.default, (TensorSpec((rows,), (1,), torch.float32),)) for rows in (2, 3))
    assert one.name != other.name
    assert one.name == Kernel(aten.neg.default, one.args, operator=3, count=2).name == "c7ba0b03c874004f"


def test_measure_compute_times_are_aligned_and_never_negative() -> None:
    found = trace_tiny_gpt()
    before = torch.get_rng_state()
    result = measure_compute(found, CPU, time_budget_s=1.0)
    assert torch.equal(before, torch.get_rng_state())
    assert len(result.operators) == len(found.model_profile.operators)
    for each in (*result.operators, result.unattributed):
        for part in (each.forward, each.backward):
            assert part.fixed >= 0
            assert part.per_sample >= 0
            assert part.value_at(4) > 0
    assert result.optimizer_s_per_byte > 0


def test_measure_compute_runs_all_kernels_of_common_layers_alone(recwarn: pytest.WarningsRecorder) -> None:
    nets = [
        (nn.LSTM(8, 6, batch_first=True), (4, 5, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (4, 3, 8, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 5, 8)),
    ]
    for net, shape in nets:
        measure_compute(trace(Regression(net), torch.ones(shape), 4, device=CPU), CPU, time_budget_s=0.1)
    assert [str(warning.message) for warning in recwarn if issubclass(warning.category, OSDPWarning)] == []


def test_measure_compute_times_opaque_backward_via_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    # How much oneDNN takes there depends on the processor, and on what it has kept from earlier calls.
    monkeypatch.setattr(
        benchmark.Clock,
        "measure_time_and_workspace",
        lambda clock, call: benchmark.KernelTime(1.0, 9 << 20 if call() else 0),
    )
    net = trace(Regression(nn.LSTM(512, 512, batch_first=True)), torch.ones(4, 8, 512), 4, device=CPU)
    (scratch,) = measure_compute(net, CPU, time_budget_s=0.1).workspace
    assert scratch.backward.value_at(2) == 9 << 20
    monkeypatch.setattr(benchmark, "_time_via_autograd", lambda *_: None)
    estimated = measure_compute(net, CPU, time_budget_s=0.1)
    assert estimated.workspace[0].backward.value_at(2) == 0
    (time,) = estimated.operators
    assert time.backward.value_at(2) > time.forward.value_at(
        2
    )  # where that is not possible, a multiple of the forward's


class CallCounter(TorchDispatchMode):
    """What was called, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[object] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def test_warm_up_runs_each_kernel_of_larger_batch_size_once() -> None:
    found = trace_tiny_gpt(3)
    with CallCounter() as seen:
        warm_up(found, CPU)
    times = Counter(key[0] for key in {kernel.key for kernel in found.kernels[8]})
    made_of = {aten.randn.default, aten.abs_.default, aten.mul.Tensor, aten.randint.low, aten.repeat.default}
    assert {func: seen.calls[func] for func in times if func not in made_of} == {
        func: count for func, count in times.items() if func not in made_of
    }


def test_warm_up_skips_kernels_that_reject_synthetic_arguments() -> None:
    lstm = trace(Regression(nn.LSTM(8, 6, batch_first=True)), torch.ones(4, 5, 8), 4, device=CPU)
    (backward,) = [kernel for kernel in lstm.kernels[2] if benchmark._has_opaque_state(kernel)]
    with CallCounter() as seen:
        warm_up(lstm, CPU)
    assert seen.calls[backward.func] > 0  # after its forward, which alone can prepare it
    broken = Kernel(aten.mm.default, (spec_of(torch.ones(2, 3)), spec_of(torch.ones(2, 3))))
    good = Kernel(aten.neg.default, (spec_of(torch.ones(2, 3)),))
    with CallCounter() as seen:
        warm_up(TracedStep(lstm.model_profile, {2: (broken, good)}, ()), CPU)
    assert seen.calls[aten.neg.default] == 1


@pytest.mark.parametrize(
    ("phase", "room_mib", "sets"),
    [("forward", 1 << 20, 8), ("optimizer", 1 << 20, 16), ("optimizer", 16, 2), ("forward", 0, 1)],
)
def test_kernel_timing_copies_arguments_beyond_cache_within_memory(
    phase: KernelPhase, room_mib: int, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(benchmark, "clone_with_strides", lambda tensor: made.append(tensor) or tensor)
    four_mib = TensorSpec((1 << 20,), (1,), torch.float32)
    kernel = Kernel(aten.neg.default, (four_mib,), phase=phase)
    assert benchmark._time(kernel, benchmark.Clock(CPU, room_mib << 20), budget_s=60.0).seconds > 0
    assert len(made) == sets - 1


def test_kernel_timing_counts_whole_storage_of_argument_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(benchmark, "clone_with_strides", lambda tensor: made.append(tensor) or tensor)
    part_of_four_mib = TensorSpec((1024, 64), (1024, 1), torch.float32)
    kernel = Kernel(aten.neg.default, (part_of_four_mib,))
    benchmark._time(kernel, benchmark.Clock(CPU), budget_s=60.0)
    assert len(made) == 15  # it reads 256 KiB: all copies that there may be
    made.clear()
    benchmark._time(kernel, benchmark.Clock(CPU, 40 << 20), budget_s=60.0)
    assert len(made) == 4  # five times 4 MiB are half of the room, but for what rows leave at the end


def test_sample_cuts_tensor_lists_to_available_memory() -> None:
    mib = TensorSpec((1 << 18,), (1,), torch.float32)
    kernel = Kernel(aten._foreach_neg.default, ((mib,) * 12,), phase="optimizer")
    assert benchmark._sample(kernel) is kernel
    cut = benchmark._sample(kernel, 8 << 20)
    assert len(cut.args[0]) == 4  # type: ignore[arg-type]
    assert len(benchmark._sample(kernel, 0).args[0]) == 1  # type: ignore[arg-type]


def test_sample_cuts_rows_of_tensor_larger_than_available_memory() -> None:
    weight, bias = TensorSpec((512, 512), (512, 1), torch.float32), TensorSpec((512,), (1,), torch.float32)
    of_one = Kernel(aten._foreach_add.List, ((weight,), (weight,)), phase="optimizer")  # 2 MiB
    (first,), (second,) = benchmark._sample(of_one, 1 << 20).args
    assert first == second == TensorSpec((128, 512), (512, 1), torch.float32)
    # Of unequal ones those that there is room for, whichever they are.
    several = Kernel(aten._foreach_neg.default, ((weight, bias, weight, bias),), phase="optimizer")
    assert benchmark._sample(several, 2 << 20).args == ((weight,),)
    assert benchmark._sample(several, 1 << 20).args == ((bias,),)


def test_measure_compute_estimates_unrunnable_kernel_with_one_warning() -> None:
    broken = Kernel(
        aten.mm.default, (spec_of(torch.ones(2, 3)), spec_of(torch.ones(2, 3))), (), UNATTRIBUTED, "forward"
    )
    good = trace_tiny_gpt()
    found = TracedStep(good.model_profile, {2: (broken,)}, ())
    with pytest.warns(OSDPWarning, match="1 of 1 kernels") as caught:
        result = measure_compute(found, CPU)
    assert len(caught) == 1
    assert 0 < result.unattributed.forward.value_at(2) < 1


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
def test_fit_nonnegative_line_has_no_negative_slope_or_intercept(
    points: list[tuple[int, float]], fixed: float, per_sample: float
) -> None:
    line = fit_nonnegative_line(points)
    assert (line.fixed, line.per_sample) == (pytest.approx(fixed), pytest.approx(per_sample))


def test_make_arguments_match_strides_and_index_range_of_kernel() -> None:
    table, index = torch.ones(50, 4), torch.zeros(3, 2, dtype=torch.long)
    kernel = Kernel(aten.embedding.default, (spec_of(table), spec_of(index.t())))
    args, _ = synthetic_args.make_arguments(kernel, CPU)
    assert args[1].stride() == index.t().stride()
    assert 0 <= int(args[1].min()) <= int(args[1].max()) < 50
    expanded = synthetic_args._make_tensor(TensorSpec((5, 4), (0, 1), torch.float32), 1, CPU)
    assert expanded.untyped_storage().nbytes() == 16
    assert torch.equal(synthetic_args.clone_with_strides(expanded), expanded)
    assert synthetic_args.clone_with_strides(expanded).data_ptr() != expanded.data_ptr()


def test_workspace_of_convolutions_is_measured_however_small_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        benchmark.Clock,
        "measure_time_and_workspace",
        lambda clock, call: benchmark.KernelTime(1.0, 9 << 20 if call() is not None else 0),
    )
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten(), nn.Linear(128, 4))
    depthwise, linear = measure_compute(
        trace(Regression(net), torch.ones(4, 8, 4, 4), 4, device=CPU), CPU, time_budget_s=0.1
    ).workspace
    assert depthwise.forward.value_at(2) == depthwise.backward.value_at(2) == 9 << 20
    assert linear.forward.value_at(2) == linear.backward.value_at(2) == 0


def test_kernel_workspace_excludes_result_of_the_call() -> None:
    configure_cpu_allocator()
    trim(CPU)  # a hole that other tests have left in the heap would take the tensor, and nothing be new
    clock, elements = benchmark.Clock(CPU), 8 << 20
    clock.measure_time_and_workspace(lambda: torch.ones(elements))
    assert clock.measure_time_and_workspace(lambda: torch.ones(elements))[1] == 0
    _, inside = clock.measure_time_and_workspace(lambda: torch.ones(elements).sum())
    assert 4 * elements <= inside + benchmark.MIN_WORKSPACE_BYTES < 4.5 * elements


def test_kernel_workspace_adds_to_moments_of_its_operator() -> None:
    model = blocks_of_one(2, 1)
    times = times_of(model)
    assert times.with_workspace(model) == model
    some = KernelWorkspace(forward=LinearInBatch(fixed=5.0), backward=LinearInBatch(per_sample=7.0))
    found = times.model_copy(update={"workspace": (KernelWorkspace(), some)}).with_workspace(model)
    for before, after in zip(model.moments, found.moments, strict=True):
        more = after.live.value_at(3) - before.live.value_at(3)
        assert more == (0 if before.operator != 1 else 5 if before.phase == "forward" else 21)


def test_kernel_workspace_is_gone_when_gradients_are_cast() -> None:
    model = blocks_of_one(1, 1)
    product = model.moments[-1].model_copy(update={"before_gradients": True})
    model = model.model_copy(update={"moments": (*model.moments[:-1], product, model.moments[-1])})
    workspace = (KernelWorkspace(backward=LinearInBatch(fixed=7.0)),)
    found = times_of(model).model_copy(update={"workspace": workspace}).with_workspace(model)
    more = [after.live.fixed - before.live.fixed for before, after in zip(model.moments, found.moments, strict=True)]
    assert more == [0, 0, 0, 7, 0]


def test_sample_cuts_long_foreach_lists_and_no_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an optimizer's lists may be cut: one index less would make another kernel."""
    monkeypatch.setattr(benchmark, "MAX_LIST_BYTES", 1000)
    spec = TensorSpec((100,), (1,), torch.float32)
    many = Kernel(aten._foreach_add_.List, ((spec,) * 10, (spec,) * 10))
    assert benchmark._sample(many).args == ((spec,), (spec,))
    places = TensorSpec((100,), (1,), torch.int64)
    for whole in (Kernel(aten.index.Tensor, (spec, (places, places))), Kernel(aten.cat.default, ((spec,) * 10,))):
        assert benchmark._sample(whole) is whole


def test_sample_of_long_lists_covers_all_tensor_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and biases take turns: every second or fourth tensor would be biases alone."""
    weight, bias = (TensorSpec((size,), (1,), torch.float32) for size in (1000, 10))
    kernel = Kernel(aten._foreach_add_.List, ((weight, bias) * 20, (weight, bias) * 20))
    for every in (2, 4):
        monkeypatch.setattr(benchmark, "MAX_LIST_BYTES", math.ceil(kernel.num_bytes / every))
        sample = benchmark._sample(kernel)
        assert sample.args == ((bias,) * (20 // every) + (weight,) * (20 // every),) * 2


@pytest.mark.parametrize(
    ("role", "s_per_byte", "forward_s", "backward_s"),
    [
        (TensorRole.LINEAR, 1e-6, 10e-3 - 0.75 * 4e-3, 20e-3 - 0.75 * 8e-3),
        (TensorRole.EMBEDDING, 1e-6, 10e-3, 20e-3 - 0.75 * 8e-3),
        (TensorRole.TABLE_ROWS, 1e-6, 10e-3, 20e-3 - 0.75 * 8e-3),
        (TensorRole.ATTENTION, 1e-6, 10e-3 - 0.75 * 4e-3, 20e-3 - 0.75 * 8e-3),
        (TensorRole.COLUMN, 1.0, 10e-3 / 4, 20e-3 / 4),  # no more is saved than there is
        (TensorRole.ROW, 0.0, 10e-3, 20e-3),
    ],
)
def test_slice_of_tensor_parallel_operator_takes_less_by_its_share_of_passes_over_the_weight(
    role: TensorRole, s_per_byte: float, forward_s: float, backward_s: float
) -> None:
    weight, bias = ParameterInfo(name="a.weight", shape=(10, 100)), ParameterInfo(name="a.bias", shape=(10,))
    use = TensorUse(role=role, degrees=(4,), input_bytes=1, output_bytes=1)
    operator = Operator(name="a", kind="Linear", parameters=(weight, bias), tensor=use)
    whole = OperatorTime(
        forward=LinearInBatch(fixed=10e-3, per_sample=1e-3), backward=LinearInBatch(fixed=20e-3, per_sample=2e-3)
    )
    (own,) = compute._with_tensor_times(whole, operator, s_per_byte, {}).tensor
    assert (own.degree, own.forward.per_sample, own.backward.per_sample) == (4, 1e-3, 2e-3)
    assert (own.forward.fixed, own.backward.fixed) == (pytest.approx(forward_s), pytest.approx(backward_s))
    assert compute._with_tensor_times(whole, operator.model_copy(update={"tensor": None}), 1.0, {}) == whole
    slower = {4: {"forward": {2: 12e-3 + 1.0, 8: 18e-3 + 1.0}, "backward": {2: 0.0, 8: 0.0}}}
    (measured,) = compute._with_tensor_times(whole, operator, s_per_byte, slower).tensor
    assert measured.forward.value_at(4) == pytest.approx(14e-3 + 1.0)  # what was measured
    assert measured.backward.value_at(4) == pytest.approx(28e-3 / 4)  # no less than its part


@pytest.mark.parametrize(("rows", "expected_s"), [(100_000, 1.0 + 4 * 4 * 6 / 100_000), (10, 9.0)])
def test_gradient_of_a_table_takes_longer_by_no_more_than_the_rows_that_are_added(rows: int, expected_s: float) -> None:
    """Of 4 tokens a sample; a kernel that is measured to take much longer with 8 samples than with 2, by chance."""
    net = nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 8))
    found = trace(Regression(net), torch.zeros(4, 4, dtype=torch.int64), 4, device=CPU)
    kernels = {
        size: next(k for k in found.kernels[size] if k.func is aten.embedding_dense_backward.default) for size in (2, 8)
    }
    times = {
        kernels[2].name: benchmark.KernelTime(1.0),
        kernels[8].name: benchmark.KernelTime(9.0, 5),
        "other": benchmark.KernelTime(7.0),
    }
    limited = limit_growth([*found.kernels[2], *found.kernels[8]], times)
    assert limited[kernels[8].name] == (pytest.approx(expected_s), 5)
    assert limited[kernels[2].name] == times[kernels[2].name]
    assert limited["other"] == times["other"]


def test_slices_of_tensor_parallel_operators_are_timed_at_the_rows_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table, two layers of an MLP and a head, cut over two ranks: as many products, of other shapes."""

    def seconds(kernel: Kernel, clock: object, share_s: float) -> benchmark.KernelTime:
        return benchmark.KernelTime(10.0 if spec_shapes(kernel) & expected else 1.0)

    def spec_shapes(kernel: Kernel) -> set[tuple[object, ...]]:
        return {tuple(spec.shape for spec in tensor_specs(kernel.args))}

    monkeypatch.setattr(benchmark, "_time", seconds)
    monkeypatch.setattr(compute, "measure_autograd_overhead", lambda clock: benchmark.AutogradOverhead(0.0, 0.0))
    net = nn.Sequential(
        nn.Embedding(50, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 6)
    )
    found = trace(Regression(net), torch.zeros(4, 3, dtype=torch.int64), 4, device=CPU, tensor_degrees=(2,))
    rows = {size: 3 * size for size in found.kernels}
    expected = {
        shapes
        for m in rows.values()
        for shapes in (
            ((50, 4), (2 * m,)),  # looked up
            ((2 * m, 4), (2 * m,)),  # and its gradient
            ((16,), (2 * m, 8), (8, 16)),  # up, with its bias
            ((16, 2 * m), (2 * m, 8)),
            ((2 * m, 16), (16, 8)),  # up's input; and down, without its bias
            ((8, 2 * m), (2 * m, 16)),
            ((2 * m, 8), (8, 16)),
            ((3,), (2 * m, 8), (8, 3)),  # head
            ((3, 2 * m), (2 * m, 8)),
            ((2 * m, 3), (3, 8)),
        )
    }
    bag = trace(
        Regression(nn.EmbeddingBag(50, 8, mode="sum")),
        torch.zeros(4, 3, dtype=torch.int64),
        4,
        device=CPU,
        tensor_degrees=(2,),
    )
    expected |= {
        shapes
        for m in (2, 8)
        for shapes in (
            ((50, 4), (2 * 3 * m,), (2 * m,)),
            ((2 * m, 4), (2 * 3 * m,), (2 * m,), (0,), (2 * m,), (2 * m,)),
        )
    }
    (of_bags,) = measure_compute(bag, CPU).operators
    (own,) = of_bags.tensor
    assert own.forward.value_at(4) == pytest.approx(of_bags.forward.value_at(4) + 9)
    assert own.backward.value_at(4) == pytest.approx(of_bags.backward.value_at(4) + 9)
    times = {
        each.name: time
        for each, time in zip(found.model_profile.operators, measure_compute(found, CPU).operators, strict=True)
    }
    for name, forward, backward in (("net.0", 1, 1), ("net.1", 1, 2), ("net.3", 1, 2), ("net.5", 1, 2)):
        (own,) = times[name].tensor
        assert own.forward.value_at(4) == pytest.approx(times[name].forward.value_at(4) + 9 * forward)
        assert own.backward.value_at(4) == pytest.approx(times[name].backward.value_at(4) + 9 * backward)
