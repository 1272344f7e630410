"""Starts on two ranks with much free memory: what is taken was tried, and is not slower than all replicated."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_osdp import OSDPStrategy
from lightning_osdp.autotune import coordinator, finalists, measure
from lightning_osdp.autotune.profile_cache import ProfileCache
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import StartupBudget
from lightning_osdp.backend import collectives
from lightning_osdp.backend.cpu import ring
from lightning_osdp.planning.search.batch_size_search import make_plan
from lightning_osdp.planning.search.finalists import is_sharded
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling import network
from lightning_osdp.strategy.step_timer import WARMUP_STEPS
from tests.support.modules import trainer
from tests.support.ranks import run_ranks
from tests.support.zoo import ZOO

RANKS, BATCH_SIZE = 2, 4
GATHER_S, DELAY_S = 50e-3, 0.3
MODELS: dict[str, dict[str, Any]] = {
    "lora": {"width": 256, "layers": 3, "rank": 8, "vocabulary": 512, "length": 16},
    "vit": {"width": 192, "layers": 3, "size": 32, "patch": 8},
}


def find_sharded(problem: Any, policy: Any, *_: Any) -> ExecutionPlan:
    """What a search finds in poisoned measurements: everything sharded, and recomputed if it can be."""
    constraints = replace(problem.constraints, modes="zdp2", activation_checkpointing=True)
    return make_plan(replace(problem, constraints=constraints), policy)


@contextmanager
def slow_gathers() -> Iterator[None]:
    """Make sharding slower than replicating for certain: in one memory, two ranks gather at hardly any cost."""

    def slow(call: Any) -> Any:
        def wait_and_call(*arguments: Any, **options: Any) -> Any:
            time.sleep(GATHER_S)
            return call(*arguments, **options)

        return wait_and_call

    places = (collectives, "_native_all_gather"), (ring, "ring_all_gather"), (ring, "all_gather_async")
    with ExitStack() as patches:
        for module, name in places:
            patches.enter_context(patch.object(module, name, slow(getattr(module, name))))
        yield


class Delay(Callback):
    """Something that takes long in each step of training, and is not there when plans are tried."""

    @override
    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        time.sleep(DELAY_S)


def start(folder: Path, name: str, is_poisoned: bool = False, steps: int = 2, *callbacks: Callback) -> dict[str, Any]:
    """A run of some steps: its plan, the rounds of each plan that was tried, and warnings of damaged files."""
    torch.manual_seed(1)
    module = ZOO[name](**MODELS[name])
    whole = module.batch(32)
    rows = [{key: value[index] for key, value in whole.items()} for index in range(32)]
    turns: list[list[int]] = []
    run, search = finalists.run_plan_trials, coordinator.plan_or_fallback

    def note_turns(*arguments: Any) -> Any:
        with slow_gathers():
            found = run(*arguments)
        turns.append([len(one.rounds_s) for one in found])
        return found

    finalists.run_plan_trials = note_turns
    coordinator.plan_or_fallback = find_sharded if is_poisoned else search
    strategy = OSDPStrategy(cache=str(folder), batch_size=BATCH_SIZE, memory_limit=8 << 30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(str(folder), strategy, max_steps=steps, callbacks=list(callbacks))
        made.fit(module, DataLoader(rows, batch_size=BATCH_SIZE))
    finalists.run_plan_trials, coordinator.plan_or_fallback = run, search
    dist.barrier()
    assert strategy.execution_plan is not None
    damaged = [str(one.message) for one in caught if "measured anew" in str(one.message)]
    return {"plan": strategy.execution_plan.to_json(), "turns": turns, "damaged": damaged}


def profile_files(folder: Path) -> list[Path]:
    """Those of each model."""
    return [file for file in folder.glob("*.json") if "-" not in file.name and "osdp" not in file.name]


def on_rank_zero(work: Any) -> None:
    """Change files between two starts."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def poison(folder: Path) -> None:
    """What one disturbed start had left for all that followed."""
    (ranks_file,) = folder.glob("ranks-*.json")
    for file in (ranks_file, *profile_files(folder)):
        data = json.loads(file.read_text())
        data.pop("checksum")
        for values in data.get("starts", [data]):
            values["engine"]["zdp2"]["fixed_s"], values["engine"]["zdp"]["fixed_s"] = -7.1e-3, -8.5e-3
            values["engine"]["calibration"]["zdp2"] = -1.13
        file.write_text(json.dumps(data))


def measure_disturbed_then_quietly(folder: Path) -> list[float]:
    """Seconds of a gather as a disturbed start measures it, and as the next one does."""
    ranks = RankGroup(dist.group.WORLD, 1, torch.device("cpu"))
    files = ProfileCache(ranks, (), folder / "ranks.json")
    once, seconds = network.LinkTimer.time_once_s, []

    def slowly_s(timer: Any, call: Any, follows_compute: bool) -> float:
        def wait_and_call() -> None:
            time.sleep(0.1)
            call()

        return once(timer, wait_and_call, follows_compute)

    for time_once_s in (slowly_s, once):
        network.LinkTimer.time_once_s = time_once_s  # type: ignore[method-assign]
        found = measure.load_or_measure_cluster(ranks, None, files, 1 << 30)
        seconds.append(found.link.all_gather.time_s(1 << 16, RANKS))
        dist.barrier()
    return seconds


USUAL = 2.0, 3
"""Of ``measure.PROBE_TOLERANCE`` and ``measure.MIN_STARTS``, which tests change in their ranks."""


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All starts in the same processes, since starting them takes longest."""
    cache = Path(folder)
    StartupBudget.remaining_s = lambda budget: 60.0  # type: ignore[method-assign]  # however busy the machine is
    found: dict[str, Any] = {name: start(cache, name, is_poisoned=True) for name in MODELS}
    found["again"] = start(cache, "lora", False, WARMUP_STEPS + 3, Delay())
    found["after error"] = start(cache, "lora")
    on_rank_zero(lambda: poison(cache))
    found["poisoned file"] = start(cache, "vit")
    measure.PROBE_TOLERANCE, measure.MIN_STARTS = USUAL
    found["disturbed"] = measure_disturbed_then_quietly(cache)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("finalists")))


@pytest.mark.parametrize("name", list(MODELS))
def test_start_with_much_memory_ends_all_replicated_whatever_the_search_found(
    results: list[dict[str, Any]], name: str
) -> None:
    plans = [ExecutionPlan.from_json(result[name]["plan"]) for result in results]
    assert plans[0] == plans[1]
    assert not is_sharded(plans[0])
    assert not plans[0].recomputed
    names = [one.name.split(",")[0] for one in plans[0].tried]
    assert set(names) > {"all replicated"}, "the plan that was found, and the simple one"
    (chosen,) = (one for one in plans[0].tried if one.is_chosen)
    assert chosen.name.startswith("all replicated")
    assert results[0][name]["turns"] == results[1][name]["turns"]
    assert all(len(set(rounds)) == 1 for rounds in results[0][name]["turns"]), "as many rounds for each plan"


def test_next_start_takes_tried_plan_and_after_mispredicted_training_tries_again(results: list[dict[str, Any]]) -> None:
    for result in results:
        first, again = (ExecutionPlan.from_json(result[name]["plan"]) for name in ("lora", "again"))
        assert result["again"]["turns"] == []
        assert again.operators == first.operators
        assert again.tried == first.tried
        assert result["after error"]["turns"]
        assert ExecutionPlan.from_json(result["after error"]["plan"]).tried


def test_poisoned_cache_files_are_not_believed(results: list[dict[str, Any]]) -> None:
    assert len(results[0]["poisoned file"]["damaged"]) == 2
    plan = ExecutionPlan.from_json(results[0]["poisoned file"]["plan"])
    assert plan.cluster.engine.zdp2.fixed_s >= 0
    assert plan.tried
    assert plan.predicted.step_time_s > 0


def test_disturbed_start_does_not_poison_next_one(results: list[dict[str, Any]]) -> None:
    disturbed_s, next_s = results[0]["disturbed"]
    assert disturbed_s > 0.09
    assert next_s < disturbed_s / 2
