"""Compute times from FLOPs and bytes, on numbers that can be worked out on paper."""

from __future__ import annotations

import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.operators import OUTSIDE, Line, ModelDescription, Moment, Operator, ParameterInfo
from lightning_osdp.planning.roofline import Efficiency, compute_times, optimizer_traffic
from tests.planning.test_hardware import hardware

WHOLE = Efficiency(flops=1.0, bandwidth=1.0)
DEVICE = hardware(peak_flops={"fp32": 1000.0, "bf16": 4000.0}, memory_bytes_per_s=100.0)


def linear(flops: float, optimizer_bytes: int = 800, trainable: bool = True) -> Operator:
    """100 parameters of 4 bytes."""
    parameter = ParameterInfo(name="w", shape=(10, 10), optimizer_bytes=optimizer_bytes, trainable=trainable)
    return Operator(name="linear", kind="Linear", parameters=(parameter,), flops_per_sample=flops)


def model(*operators: Operator, moments: tuple[Moment, ...] = (), outside: float = 0.0) -> ModelDescription:
    return ModelDescription(
        fingerprint="", operators=operators, moments=moments, batch_size=1, outside_flops_per_sample=outside
    )


def test_compute_bound_a_third_forward_and_two_thirds_backward() -> None:
    # 30,000 FLOPs a sample at 1000 a second: 10 s forward, 20 s backward. Bytes take 4 and 8 s at any batch size.
    (times,) = compute_times(model(linear(30_000)), DEVICE, efficiency=WHOLE).operators
    for size in (1, 7, 64):
        assert times.forward.at(size) == pytest.approx(10 * size)
        assert times.backward.at(size) == pytest.approx(20 * size)


def test_memory_bound_reads_parameters_twice_and_writes_gradients_once() -> None:
    # 3 FLOPs a sample: nothing. 400 B read forward (4 s); read again and 400 B written backward (8 s).
    (times,) = compute_times(model(linear(3)), DEVICE, efficiency=WHOLE).operators
    assert times.forward.at(5) == pytest.approx(4)
    assert times.backward.at(5) == pytest.approx(8)


def test_a_frozen_operator_writes_no_gradient() -> None:
    (times,) = compute_times(model(linear(3, trainable=False)), DEVICE, efficiency=WHOLE).operators
    assert times.backward.at(1) == pytest.approx(4)


def test_an_operator_without_flops_does_not_read_its_table() -> None:
    (times,) = compute_times(model(linear(0)), DEVICE, efficiency=WHOLE).operators
    assert times.forward.at(1) == 0
    assert times.backward.at(1) == pytest.approx(4)


def test_between_the_bounds_the_secant_meets_the_roofline_at_both_sizes() -> None:
    # Forward: bytes 4 s at any size, FLOPs 1 s a sample: 4 s at 1, 64 s at 64.
    (times,) = compute_times(model(linear(3_000)), DEVICE, efficiency=WHOLE).operators
    assert times.forward.at(1) == pytest.approx(4)
    assert times.forward.at(64) == pytest.approx(64)
    assert times.forward.at(32) >= 32


def test_efficiency_divides_each_peak() -> None:
    half = Efficiency(flops=0.5, bandwidth=0.25)
    assert compute_times(model(linear(30_000)), DEVICE, efficiency=half).operators[0].forward.at(1) == pytest.approx(20)
    assert compute_times(model(linear(3)), DEVICE, efficiency=half).operators[0].forward.at(1) == pytest.approx(16)


def test_dtype_picks_the_peak() -> None:
    (times,) = compute_times(model(linear(30_000)), DEVICE, "bf16", WHOLE).operators
    assert times.forward.at(64) == pytest.approx(160)
    with pytest.raises(ConfigurationError, match="no peak FLOP/s for 'fp8'"):
        compute_times(model(linear(1)), DEVICE, "fp8")


def test_activations_move_twice_the_change_of_what_is_live() -> None:
    # Live bytes a sample: 0 -> 50 in the operator, -> 80 outside, -> 20 in its backward.
    moments = (
        Moment(phase="forward", operator=0, live=Line(per_sample=50)),
        Moment(phase="forward", operator=OUTSIDE, live=Line(per_sample=80)),
        Moment(phase="backward", operator=0, live=Line(per_sample=20)),
    )
    times = compute_times(model(linear(3), moments=moments), DEVICE, efficiency=WHOLE)
    assert times.operators[0].forward.at(10) == pytest.approx(4 + 10 * 2 * 50 / 100)
    assert times.outside.forward.at(10) == pytest.approx(10 * 2 * 30 / 100)
    assert times.outside.backward.at(10) == 0
    assert times.operators[0].backward.at(10) == pytest.approx(8 + 10 * 2 * 60 / 100)


def test_work_outside_of_operators_counts() -> None:
    times = compute_times(model(linear(3), outside=6_000), DEVICE, efficiency=WHOLE)
    assert times.outside.forward.at(3) == pytest.approx(6)
    assert times.outside.backward.at(3) == pytest.approx(12)


def test_the_optimizer_moves_seven_bytes_for_adam_and_three_for_sgd() -> None:
    assert optimizer_traffic([linear(1)]) == 7  # two states of 400 B
    assert optimizer_traffic([linear(1, optimizer_bytes=400)]) == 5
    assert optimizer_traffic([linear(1, optimizer_bytes=0)]) == 3
    assert optimizer_traffic([linear(1), linear(1, optimizer_bytes=0, trainable=False)]) == 7
    assert compute_times(model(linear(1)), DEVICE, efficiency=WHOLE).optimizer_s_per_byte == pytest.approx(0.07)
