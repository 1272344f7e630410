"""One rank runs out of memory in a trial while others go on: the trial is left out on all, and they go on together."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.autotune.calibration import run_calibration_trials
from lightning_osdp.autotune.trials import run_plan_trials
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.profiling import compute
from tests.support.leaks import leaked_parameter_bytes
from tests.support.ranks import run_ranks
from tests.support.traced_models import trace
from tests.support.trials import BATCH, CPU, Module, make_trial_setup, mixed_plan

RANKS, FAILING = 2, 1
PLACES = ("batch", "before", "between", "after", "backward", "first backward", "engine")
KINDS = ("unsharded", "plan")
CASES = [(kind, place) for kind in KINDS for place in PLACES if (kind, place) != ("unsharded", "engine")]
ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
BOUND_S = 5.0
"""Seconds of a trial that fails; ranks that wait for each other take 10 and more."""


class Short(Module):
    """Runs out of memory at a place of its step, on one rank alone."""

    place = ""

    def reach(self, place: str) -> None:
        if Short.place == place and dist.get_rank() == FAILING:
            raise ERROR

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_index: int) -> Any:
        self.reach("batch")
        return super().transfer_batch_to_device(batch, device, dataloader_index)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if type(batch) is not Tensor:  # it is traced
            return super().training_step(batch, batch_index)
        self.reach("before")
        x = self.net[0](batch)
        self.reach("between")
        x.register_hook(lambda _: self.reach("backward"))
        x = self.net[3](self.net[1](x))
        y = self.net[4](x)
        y.register_hook(lambda _: self.reach("first backward"))
        self.reach("after")
        return y.square().mean()


def run(kind: str, setup: Any, times: Any) -> int:
    """How many trials came to an end."""
    if kind == "plan":
        plan = mixed_plan(RANKS).model_copy(update={"batch_size": 6})
        return len(run_plan_trials(setup, lambda _: times, [plan], 0.0))
    return len(run_calibration_trials(setup, times).unsharded)


def run_all(rank: int, ranks: int) -> dict[Any, Any]:
    module = Short()
    traced = trace(module, BATCH, 4, device=CPU)
    constraints = SearchConstraints(slice_granularity={"net.3": 2})
    times = [compute.measure_compute(traced, CPU, time_budget_s=0.0, constraints=constraints)] * ranks
    dist.all_gather_object(times, times[rank])
    setup, set_plan, found = make_trial_setup(module, traced), FairScaleEngine._set_plan, {}

    def set_or_fail(self: FairScaleEngine, plan: Any) -> None:
        set_plan(self, plan)
        module.reach("engine")

    FairScaleEngine._set_plan = set_or_fail  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for kind, place in CASES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Short.place, began_s = place, time.monotonic()
            failed = run(kind, setup, times[0])
            seconds = time.monotonic() - began_s
            Short.place = ""
            worked = run(kind, setup, times[0])
        same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        texts = [str(each.message) for each in caught if "can't be tried" in str(each.message)]
        found[kind, place] = failed, worked, same and not leaked_parameter_bytes(module), texts, seconds
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_ranks(run_all, RANKS)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_trial_that_one_rank_has_no_memory_for_is_left_out_on_all_ranks(
    results: list[dict[Any, Any]], case: tuple[str, str]
) -> None:
    for result in results:
        failed, worked, is_as_before, texts, seconds = result[case]
        assert failed == 0
        assert worked > 0
        assert is_as_before
        (text,) = texts
        assert f"rank {FAILING} failed: OutOfMemoryError: CUDA out of memory" in text
        assert seconds < BOUND_S
