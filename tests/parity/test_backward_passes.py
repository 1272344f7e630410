"""Hooks, backward passes and results out of the ordinary train as without sharding, in every mode."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.splittable import split_dims
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.backward_cases import CASES, ROWS, WIDTH
from tests.support.models import wrap_blocks
from tests.support.ranks import run_ranks
from tests.support.split_plans import Split, split_plan

OPERATORS = ("first", "block.op", "block.lin", "out")
NUM_STEPS = 2
POLICIES = ("zdp", "zdp2", "mixed", "joined zdp", "joined zdp2", "recomputed zdp", "recomputed zdp2", "sliced")

NOT_PLANNED = {
    ("in_direct_forward", "joined"),  # the traced step shows that operators run without the block
    ("spectral norm", "recomputed"),  # buffers change when the block runs
    ("parametrized spectral norm", "recomputed"),
    ("writes without grad before", "recomputed"),  # so do weights
    ("adaptive_weight", "sliced"),  # asks for the gradient of a weight
    ("weight_gradient_penalty", "sliced"),
    ("only_some_inputs", "sliced"),
    ("with_global_hooks", "sliced"),  # a hook reads weights
}
"""What is not done (a case, and the first word of a policy), since the traced step shows that it can't."""

RUNS = [(n, p) for n in CASES for p in POLICIES if (n, p.split()[0]) not in NOT_PLANNED]


def plan_of(model: nn.Module, policy: str, ranks: int) -> ExecutionPlan:
    kind = policy.split()[-1]
    modes = [[Mode.ZDP, Mode.ZDP2, Mode.DP][i % 3] if kind == "mixed" else Mode.ZDP for i in range(4)]
    if kind == "zdp2":
        modes = [Mode.ZDP2] * 4
    splits: dict[str, Split] = {name: ((mode,), None) for name, mode in zip(OPERATORS, modes, strict=True)}
    if kind == "sliced":
        for index, name in enumerate(OPERATORS):
            dims, _ = split_dims(model.get_submodule(name))
            if dims:
                splits[name] = ((Mode.ZDP, Mode.ZDP2, Mode.DP), dims[index % 2])
    recomputed = ("block",) if policy.startswith("recomputed") else ()
    return wrap_blocks(split_plan(splits, ranks, recomputed), ("block",) if policy.startswith("joined") else ())


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, ranks: int, name: str, policy: str) -> dict[str, Tensor]:
    """Weights after some steps; ``plain``: each rank has all of them and gradients are averaged."""
    build, step_of = CASES[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine = FairScaleEngine(torch.device("cpu"))
    if policy != "plain":
        engine.apply(model, plan_of(model, policy, ranks), [optimizer])
    for step in range(NUM_STEPS):
        if policy != "plain":
            engine.before_forward()
        step_of(model, inputs(rank, step))
        if policy == "plain":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ranks
        else:
            engine.finish_backward()
            assert not any(unit.has_unsharded_params for unit in engine._units)
            engine.before_optimizer_step(optimizer)
        optimizer.step()
        if policy != "plain":
            engine.after_optimizer_step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(inputs(rank, 9))
    return engine.model_state() if policy != "plain" else model.state_dict()


def train_all(rank: int, ranks: int) -> dict[tuple[str, str], Any]:
    """By case and policy, the weights or the error."""
    found: dict[tuple[str, str], Any] = {}
    for name, policy in [*((name, "plain") for name in CASES), *RUNS]:
        try:
            found[name, policy] = train(rank, ranks, name, policy)
        except Exception:
            found[name, policy] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], Any]:
    return run_ranks(train_all, 2)[0]


@pytest.mark.parametrize(("name", "policy"), RUNS)
def test_unusual_step_trains_like_plain(results: dict[tuple[str, str], Any], name: str, policy: str) -> None:
    expected, ours = results[name, "plain"], results[name, policy]
    assert not isinstance(expected, str), expected
    assert not isinstance(ours, str), ours
    assert list(ours) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
