"""Compute times from FLOPs and bytes, on numbers that can be worked out on paper."""

from __future__ import annotations

import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.model import (
    UNATTRIBUTED,
    LinearInBatch,
    ModelProfile,
    Moment,
    Operator,
    ParameterInfo,
)
from lightning_osdp.planning.whatif.roofline import Efficiency, compute_times, optimizer_traffic
from tests.unit.planning.whatif.test_hardware import hardware

WHOLE = Efficiency(flops=1.0, bandwidth=1.0)
DEVICE = hardware(peak_flops={"fp32": 1000.0, "bf16": 4000.0}, memory_bytes_per_s=100.0)


def linear(flops: float, optimizer_bytes: int = 800, trainable: bool = True) -> Operator:
    """100 parameters of 4 bytes."""
    parameter = ParameterInfo(name="w", shape=(10, 10), optimizer_bytes=optimizer_bytes, trainable=trainable)
    return Operator(name="linear", kind="Linear", parameters=(parameter,), flops_per_sample=flops)


def model(*operators: Operator, moments: tuple[Moment, ...] = (), outside: float = 0.0) -> ModelProfile:
    return ModelProfile(
        fingerprint="", operators=operators, moments=moments, batch_size=1, unattributed_flops_per_sample=outside
    )


def test_compute_times_compute_bound_spends_two_thirds_in_backward() -> None:
    # 30,000 FLOPs a sample at 1000 a second: 10 s forward, 20 s backward. Bytes take 4 and 8 s at any batch size.
    (times,) = compute_times(model(linear(30_000)), DEVICE, efficiency=WHOLE).operators
    for size in (1, 7, 64):
        assert times.forward.value_at(size) == pytest.approx(10 * size)
        assert times.backward.value_at(size) == pytest.approx(20 * size)


def test_compute_times_memory_bound_reads_parameters_twice_writes_gradients_once() -> None:
    # 3 FLOPs a sample: nothing. 400 B read forward (4 s); read again and 400 B written backward (8 s).
    (times,) = compute_times(model(linear(3)), DEVICE, efficiency=WHOLE).operators
    assert times.forward.value_at(5) == pytest.approx(4)
    assert times.backward.value_at(5) == pytest.approx(8)


def test_compute_times_frozen_operator_writes_no_gradient() -> None:
    (times,) = compute_times(model(linear(3, trainable=False)), DEVICE, efficiency=WHOLE).operators
    assert times.backward.value_at(1) == pytest.approx(4)


def test_compute_times_operator_without_flops_reads_no_parameters_in_forward() -> None:
    (times,) = compute_times(model(linear(0)), DEVICE, efficiency=WHOLE).operators
    assert times.forward.value_at(1) == 0
    assert times.backward.value_at(1) == pytest.approx(4)


def test_compute_times_line_meets_roofline_at_smallest_and_largest_batch_size() -> None:
    # Forward: bytes 4 s at any size, FLOPs 1 s a sample: 4 s at 1, 64 s at 64.
    (times,) = compute_times(model(linear(3_000)), DEVICE, efficiency=WHOLE).operators
    assert times.forward.value_at(1) == pytest.approx(4)
    assert times.forward.value_at(64) == pytest.approx(64)
    assert times.forward.value_at(32) >= 32


def test_compute_times_efficiency_divides_peak_flops_and_bandwidth() -> None:
    half = Efficiency(flops=0.5, bandwidth=0.25)
    assert compute_times(model(linear(30_000)), DEVICE, efficiency=half).operators[0].forward.value_at(
        1
    ) == pytest.approx(20)
    assert compute_times(model(linear(3)), DEVICE, efficiency=half).operators[0].forward.value_at(1) == pytest.approx(
        16
    )


def test_compute_times_dtype_selects_peak_flops() -> None:
    (times,) = compute_times(model(linear(30_000)), DEVICE, "bf16", WHOLE).operators
    assert times.forward.value_at(64) == pytest.approx(160)
    with pytest.raises(ConfigurationError, match="no peak FLOP/s for 'fp8'"):
        compute_times(model(linear(1)), DEVICE, "fp8")


def test_compute_times_charge_twice_the_change_of_live_bytes() -> None:
    # Live bytes a sample: 0 -> 50 in the operator, -> 80 outside, -> 20 in its backward.
    moments = (
        Moment(phase="forward", operator=0, live=LinearInBatch(per_sample=50)),
        Moment(phase="forward", operator=UNATTRIBUTED, live=LinearInBatch(per_sample=80)),
        Moment(phase="backward", operator=0, live=LinearInBatch(per_sample=20)),
    )
    times = compute_times(model(linear(3), moments=moments), DEVICE, efficiency=WHOLE)
    assert times.operators[0].forward.value_at(10) == pytest.approx(4 + 10 * 2 * 50 / 100)
    assert times.unattributed.forward.value_at(10) == pytest.approx(10 * 2 * 30 / 100)
    assert times.unattributed.backward.value_at(10) == 0
    assert times.operators[0].backward.value_at(10) == pytest.approx(8 + 10 * 2 * 60 / 100)


def test_compute_times_include_unattributed_flops() -> None:
    times = compute_times(model(linear(3), outside=6_000), DEVICE, efficiency=WHOLE)
    assert times.unattributed.forward.value_at(3) == pytest.approx(6)
    assert times.unattributed.backward.value_at(3) == pytest.approx(12)


def test_optimizer_traffic_is_seven_bytes_for_adam_and_three_for_sgd() -> None:
    assert optimizer_traffic([linear(1)]) == 7  # two states of 400 B
    assert optimizer_traffic([linear(1, optimizer_bytes=400)]) == 5
    assert optimizer_traffic([linear(1, optimizer_bytes=0)]) == 3
    assert optimizer_traffic([linear(1), linear(1, optimizer_bytes=0, trainable=False)]) == 7
    assert compute_times(model(linear(1)), DEVICE, efficiency=WHOLE).optimizer_s_per_byte == pytest.approx(0.07)
