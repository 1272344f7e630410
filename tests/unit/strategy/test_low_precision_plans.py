"""What a plan under mixed precision says and predicts, and the type that a user wants gradients to be reduced in."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

import lightning_osdp
from lightning_osdp import ConfigurationError, ExecutionPlan, OSDPCallback, OSDPStrategy
from lightning_osdp.strategy.planning_options import PlanningOptions
from tests.support.modules import GPTModule, loader


@cache
def plan(precision: str, mode: str, **options: Any) -> ExecutionPlan:
    callback = OSDPCallback(modes=mode, activation_checkpointing=False, slice_granularity=1)
    return lightning_osdp.plan(
        GPTModule(),
        loader(32, 2),
        hardware="h100-80gb-nvlink",
        devices=8,
        batch_size=2,
        callback=callback,
        trainer_args={"precision": precision},
        **options,
    )


def test_plan_says_which_operators_gather_casts_and_reads_it_back() -> None:
    made = plan("bf16-mixed", "zdp")
    types = {op.name.rpartition(".")[2]: (op.compute_dtype, op.gathers_in_backward) for op in made.operators}
    assert types["qkv"] == types["head"] == ("bfloat16", True)
    assert types["embed"] == ("bfloat16", False)
    assert {op.compute_dtype for op in plan("32-true", "zdp").operators} == {""}
    assert ExecutionPlan.from_json(made.to_json()) == made


@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_mixed_precision_predicts_less_communication_and_less_gathered(mode: str) -> None:
    mixed, full = plan("bf16-mixed", mode), plan("32-true", mode)
    assert 0 < mixed.predicted.communication_time_s < full.predicted.communication_time_s
    assert mixed.peak is not None
    assert full.peak is not None
    if mode == "zdp2":
        assert 0 < mixed.peak.gathered < 0.6 * full.peak.gathered


@pytest.mark.parametrize("mode", ["dp", "zdp", "zdp2"])
def test_reduction_in_bf16_predicts_less_communication(mode: str) -> None:
    full, half = plan("bf16-mixed", mode), plan("bf16-mixed", mode, reduce_dtype="bf16")
    assert (full.reduce_dtype, half.reduce_dtype) == ("", "bfloat16")
    assert 0 < half.predicted.communication_time_s < full.predicted.communication_time_s
    assert plan("bf16-mixed", mode, reduce_dtype="fp32").predicted == full.predicted


@pytest.mark.parametrize("value", ["fp16", "float32", "", 16, torch.bfloat16, ["bf16"], False])
def test_unknown_reduce_dtype_is_refused(value: Any) -> None:
    expected = r"reduce_dtype=.* is not known: use 'fp32', 'bf16', or None for the gradients' own type"
    with pytest.raises(ConfigurationError, match=expected):
        OSDPStrategy(reduce_dtype=value, cluster_environment=LightningEnvironment())
    with pytest.raises(ConfigurationError, match=expected):
        PlanningOptions(reduce_dtype=value)
