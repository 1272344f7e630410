"""Plans on described hardware for several numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.whatif.hardware import Hardware
from lightning_osdp.planning.whatif.simulate import SimulatedPoint, problem_for_hardware, simulate_one


def simulate(
    model: ModelProfile,
    hardware: Hardware,
    devices: Sequence[int],
    memory_limit_bytes: int | None = None,
    policy: BatchSizePolicy | None = None,
) -> list[SimulatedPoint]:
    problems = (problem_for_hardware(model, hardware, count, memory_limit_bytes) for count in devices)
    return [simulate_one(problem, policy or BatchSizePolicy()) for problem in problems]
