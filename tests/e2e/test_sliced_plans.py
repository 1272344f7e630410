"""Plans that the search makes for a tight limit, so that they split and recompute, in whole runs on two gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_osdp import ConfigurationError, InfeasibleError, OSDPCallback, OSDPStrategy, explain
from lightning_osdp.autotune import coordinator
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.e2e.test_fit import build_seeded
from tests.support.models import gpt_loss, some_cluster, two_groups
from tests.support.modules import dataset, trainer
from tests.support.ranks import run_ranks

RANKS, BATCH_SIZE, STEPS = 2, 4, 4

WISHES: dict[str, tuple[Any, Any]] = {
    "a number, all blocks": (4, True),
    "patterns": ({"model.blocks.0": 2, "*.head": 3}, ["model.blocks.1"]),
    "a pattern, no block": ({"model.blocks.*.up": 8}, False),
    "a number, the search's blocks": (2, "auto"),
}
"""slice_granularity and activation_checkpointing."""

MISTAKES: dict[str, tuple[Any, Any]] = {
    "slices": ({"model.block.0": 2}, "auto"),
    "blocks": ("auto", ["model.blocks.7"]),
}

MODES: dict[str, Any] = {
    "zdp": "zdp",
    "zdp2": "zdp2",
    "modes by pattern": {"model.blocks.0": "zdp", "model.blocks.*.up": "dp", "*.head": "zdp2"},
}
"""OSDPCallback(modes=...) where memory is ample, so that the search would replicate everything."""

WRONG_MODES: dict[str, Any] = {"modes": {"model.block.0": "zdp"}, "small": {"*.norm1": "zdp"}}

ROOM = 1.01
"""The limit, as a share of what the plan of least memory takes."""


def fit(folder: str, wishes: tuple[Any, Any], limit_bytes: int, modes: Any = "auto") -> tuple[Any, Any]:
    module = build_seeded(own_rows=True)
    strategy = OSDPStrategy(limit_bytes, BATCH_SIZE, cluster=some_cluster(RANKS), cache=f"{folder}/cache")
    callback = OSDPCallback(*wishes, progress_bar=False, modes=modes)
    made = trainer(folder, strategy, max_steps=STEPS, callbacks=[callback], use_distributed_sampler=False)
    made.fit(module)
    return made, module


def min_memory_bytes(folder: str, wishes: tuple[Any, Any]) -> int:
    """What the error of a limit that nothing fits in asks for."""
    with pytest.raises(InfeasibleError) as caught:
        fit(folder, wishes, 1)
    return int(caught.value.needed_bytes)


def fit_at_tight_limit(folder: str, name: str) -> dict[str, Any]:
    """A run under a limit that only a plan of little memory keeps to."""
    return save(folder, name, *fit(folder, WISHES[name], int(ROOM * min_memory_bytes(folder, WISHES[name]))))


def save(folder: str, name: str, made: Any, module: Any) -> dict[str, Any]:
    path = f"{folder}/{name}.ckpt"
    made.save_checkpoint(path)
    return {"plan": made.strategy.execution_plan.to_json(), "losses": module.losses, "checkpoint": path}


def catch_pattern_error(folder: str, name: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit(folder, MISTAKES.get(name, ("auto", "auto")), 1 << 40, WRONG_MODES.get(name, "auto"))
    return str(caught.value)


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    # What the process takes by itself is a thousand times what this model does, and differs from run to run.
    coordinator.process_overhead = lambda *_: 0
    runs = {name: fit_at_tight_limit(folder, name) for name in WISHES}
    free = ("auto", "auto")
    runs |= {name: save(folder, name, *fit(folder, free, 1 << 40, modes)) for name, modes in MODES.items()}
    return runs | {name: catch_pattern_error(folder, name) for name in (*MISTAKES, *WRONG_MODES)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("split")))


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of plain PyTorch on the same global batches."""
    module = build_seeded()
    optimizer = two_groups(module)
    losses = []
    for batch in dataset(32).tensors[0].split(RANKS * BATCH_SIZE)[:STEPS]:
        optimizer.zero_grad()
        loss = gpt_loss(module.model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, module.state_dict()


@pytest.mark.parametrize("name", [*WISHES, *MODES])
def test_plan_trains_like_plain_pytorch(name: str, results: list[dict[str, Any]], reference: Any) -> None:
    losses, weights = reference
    means = torch.tensor([result[name]["losses"] for result in results]).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=1e-5, atol=0)
    plain = build_seeded()
    plain.load_state_dict(torch.load(results[0][name]["checkpoint"], weights_only=True)["state_dict"])
    for key, weight in plain.state_dict().items():
        torch.testing.assert_close(weight, weights[key], rtol=1e-5, atol=1e-6)


def plan_of(results: list[dict[str, Any]], name: str) -> ExecutionPlan:
    plan = ExecutionPlan.from_json(results[0][name]["plan"])
    assert plan.predicted.peak_memory_bytes <= plan.memory_limit_bytes
    return plan


def slices_of(plan: ExecutionPlan) -> dict[str, int]:
    """Of the operators that are split."""
    return {op.name: len(op.slices) for op in plan.operators if len(op.slices) > 1}


def test_slice_granularity_number_applies_to_every_operator(results: list[dict[str, Any]]) -> None:
    plan = plan_of(results, "a number, all blocks")
    split = slices_of(plan)
    assert {name for name in split if name.startswith("model.blocks")}
    assert set(split.values()) == {4}
    assert plan.recomputed == ("model.blocks.0", "model.blocks.1")


def test_slice_granularity_patterns_apply_to_matching_operators(results: list[dict[str, Any]]) -> None:
    plan = plan_of(results, "patterns")
    split = slices_of(plan)
    expected = {name: 3 if name.endswith("head") else 2 for name in split}
    assert split == expected
    assert all(name.startswith("model.blocks.0") or name.endswith("head") for name in split)
    assert split
    assert plan.recomputed == ("model.blocks.1",)


def test_activation_checkpointing_false_recomputes_nothing(results: list[dict[str, Any]]) -> None:
    plan = plan_of(results, "a pattern, no block")
    assert slices_of(plan) == {"model.blocks.0.up": 8, "model.blocks.1.up": 8}
    assert plan.recomputed == ()


def test_search_at_tight_limit_recomputes_blocks(results: list[dict[str, Any]]) -> None:
    plan = plan_of(results, "a number, the search's blocks")
    assert slices_of(plan)
    assert plan.recomputed
    assert "recompute" in explain(plan)


@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_modes_with_one_word_hold_for_every_operator_that_can_be_sharded(
    mode: str, results: list[dict[str, Any]]
) -> None:
    plan = plan_of(results, mode)
    sharded = [op for op in plan.operators if op.num_parameters >= 1024]
    assert {set_mode for op in sharded for set_mode in op.slices} == {mode}
    assert {op.requested_mode for op in plan.operators} == {mode}
    text = explain(plan)
    assert "As you wished: OSDPCallback(modes=...) asks for it." in text
    assert f"OSDPCallback(modes=...) asks for {mode}, which is not possible: its parameters are too small" in text


def test_modes_by_pattern_hold_where_the_first_one_matches(results: list[dict[str, Any]]) -> None:
    plan = plan_of(results, "modes by pattern")
    modes = {op.name: set(op.slices) for op in plan.operators if op.num_parameters >= 1024}
    assert modes["model.blocks.0.up"] == {"zdp"}
    assert modes["model.blocks.1.up"] == {"dp"}
    assert modes["model.head"] == {"zdp2"}
    assert {op.requested_mode for op in plan.operators if op.name.startswith("model.blocks.1.down")} == {None}


@pytest.mark.parametrize(
    ("name", "words"),
    [("slices", "slice_granularity: 'model.block.0' matches no operator"),
     ("blocks", "activation_checkpointing: 'model.blocks.7' matches no block"),
     ("modes", "modes: 'model.block.0' matches no operator"),
     ("small", "can't be zdp: its parameters are too small")],
)  # fmt: skip
def test_pattern_matching_nothing_raises_configuration_error(
    name: str, words: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        assert words in result[name]
        assert "model.blocks.0" in result[name]
