"""Precision and clipping: what plain PyTorch does with whole gradients, done with parts of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from lightning_osdp import OSDPStrategy
from tests.parity.test_low_precision import with_casts
from tests.support.lightning_contract import (
    FEATURES,
    HIDDEN,
    RANKS,
    Net,
    batches,
    build_seeded,
    global_batches,
    make_planned_trainer,
    mixed_plan,
)
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
HALVES = [(precision, reduced) for precision in DTYPES for reduced in (None, "fp32")]


def mixed(folder: str) -> dict[str, Any]:
    """(losses, dtype of the weights, final state) with autocast and without; with it, casts are gathered."""
    found = {}
    for precision, dtype in (("32-true", ""), ("bf16-mixed", "bfloat16"), ("16-mixed", "float16")):
        module, data = build_seeded(Net), batches(6, 4)
        plan = with_casts(mixed_plan(build_seeded(Net), next(iter(data)), 4), build_seeded(Net), dtype)
        # Trainer(precision="16-mixed") is turned into bf16-mixed on a CPU, by Lightning; the plugin is not.
        plugin = (
            {"plugins": [MixedPrecision("16-mixed", "cpu")]} if precision == "16-mixed" else {"precision": precision}
        )
        made = trainer(folder, OSDPStrategy(plan=plan), max_steps=6, **plugin)
        made.fit(module, data)
        found[precision] = (module.losses, str(module.first.weight.dtype), made.strategy.lightning_module_state_dict())
    return found


def half(folder: str) -> dict[str, Any]:
    """(losses, dtypes of weights and momenta, final state) with 16-bit weights, in both kinds of gathered units."""
    found = {}
    for precision, reduced in HALVES:
        module, data, dtype = build_seeded(Net), batches(6, 4), DTYPES[precision]
        points, labels = next(iter(data))
        plan = mixed_plan(build_seeded(Net).to(dtype), [points.to(dtype), labels], 4)
        plan = plan.model_copy(update={"reduce_dtype": "float32" if reduced else ""})
        made = trainer(folder, OSDPStrategy(plan=plan, reduce_dtype=reduced), max_steps=6, precision=precision)
        made.fit(module, data)
        dtypes = {str(p.dtype) for p in module.parameters()}
        dtypes |= {str(state["momentum_buffer"].dtype) for state in made.optimizers[0].state.values()}
        found[precision, reduced] = (module.losses, dtypes, made.strategy.lightning_module_state_dict())
    return found


class Overflowing(Net):
    """In its second step one row of a sharded weight has an infinite gradient, on the second rank's part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.scales: list[float] = []
        self.weights: list[Tensor] = []
        self.finite: list[bool] = []

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        factor = 3e38 if batch_index == 1 else 0.0
        return loss + factor * self.extra(batch[0].abs())[:, -1].float().sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.finite.append(bool(self.extra.weight.grad.isfinite().all()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        self.weights.append(self.last.weight.detach().clone())


def overflow(folder: str) -> Any:
    """(scale after each step, where gradients were finite, where weights changed, scale in a checkpoint)."""
    module, data = build_seeded(Overflowing), batches(4, 4)
    plan = mixed_plan(build_seeded(Overflowing), next(iter(data)), 4)
    operators = tuple(
        op.model_copy(update={"slices": ("zdp",), "unit": ""}) if op.name == "extra" else op for op in plan.operators
    )
    plan = type(plan).model_validate(plan.model_copy(update={"operators": operators}).model_dump())
    plan = with_casts(plan, module, "float16")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    made = trainer(folder, OSDPStrategy(plan=plan), max_steps=4, plugins=[plugin])
    made.fit(module, data)
    changed = [not torch.equal(a, b) for a, b in zip(module.weights, module.weights[1:], strict=False)]
    made.save_checkpoint(f"{folder}/scaler.ckpt")
    saved = torch.load(f"{folder}/scaler.ckpt", weights_only=True)["MixedPrecision"]["scale"]
    return module.scales, module.finite, changed, saved


class Clipped(Net):
    """Clips by hand: Lightning's way for one half of the parameters, by the strategy's norm for the other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norms: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        clip = {"override": self.trainer.strategy.clip_grad_norm, "torch's own": clip_grad_norm_}.get(self.way)
        if clip is not None:
            norm = clip(self.first.parameters(), 0.1, 1.0)
            rest = [*self.second.parameters(), *self.last.parameters()]
            self.norms += [float(norm), float(clip(rest, 1e9))]
            self.clip_gradients(optimizer, 0.2, "value")
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def clipped(folder: str) -> dict[str, Any]:
    """(norms, final state) for each way to clip."""
    ways = {"norm": {"gradient_clip_val": 0.3}, "value": {"gradient_clip_val": 0.05}, "override": {}, "torch's own": {}}
    ways["value"]["gradient_clip_algorithm"] = "value"  # type: ignore[assignment]
    found = {}
    for way, options in ways.items():
        module, data = build_seeded(Clipped, way), batches(4, 4)
        made = make_planned_trainer(folder, build_seeded(Net), data, **options)
        made.fit(module, data)
        found[way] = (module.norms, made.strategy.lightning_module_state_dict())
    return found


def plain_clipped(way: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process."""
    module = build_seeded(Net)
    optimizer = module.configure_optimizers()
    norms = []
    for batch in global_batches(batches(4, 4)):
        optimizer.zero_grad()
        functional.cross_entropy(module(batch[0]), batch[1]).backward()
        if way == "norm":
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        elif way == "value":
            nn.utils.clip_grad_value_(module.parameters(), 0.05)
        else:
            norms.append(float(nn.utils.clip_grad_norm_(module.first.parameters(), 0.1, 1.0)))
            rest = [*module.second.parameters(), *module.last.parameters()]
            norms.append(float(nn.utils.clip_grad_norm_(rest, 1e9)))
            nn.utils.clip_grad_value_(module.parameters(), 0.2)
        optimizer.step()
    return norms, module.state_dict()


def plain_half(dtype: torch.dtype) -> list[float]:
    """Mean losses of one process with the same 16-bit weights."""
    module = build_seeded(Net).to(dtype)
    optimizer = module.configure_optimizers()
    losses = []
    for points, labels in global_batches(batches(6, 4)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(points.to(dtype)), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run_scenarios(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All in the same processes."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    results = {}
    for scenario in (mixed, half, overflow, clipped):
        dist.barrier()
        results[scenario.__name__] = scenario(folder)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(run_scenarios, RANKS, str(tmp_path_factory.mktemp("precision")))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_keeps_weights_in_float32(results: list[dict[str, Any]], precision: str) -> None:
    for result in results:
        exact, _, _ = result["mixed"]["32-true"]
        losses, dtype, state = result["mixed"][precision]
        assert losses != exact
        assert losses == pytest.approx(exact, rel=3e-2)
        assert dtype == "torch.float32"
        assert all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.parametrize(("precision", "reduced"), HALVES, ids=str)
def test_true_half_precision_matches_plain_pytorch(
    results: list[dict[str, Any]], precision: str, reduced: str | None
) -> None:
    dtype, case = DTYPES[precision], (precision, reduced)
    mean = torch.tensor([result["half"][case][0] for result in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(plain_half(dtype)), rtol=2e-2, atol=1e-2)
    for result in results:
        assert result["half"][case][1] == {str(dtype)}
    assert {value.dtype for value in results[0]["half"][case][2].values()} == {dtype}


def test_grad_scaler_with_inf_on_one_rank_skips_step_on_all_ranks(results: list[dict[str, Any]]) -> None:
    finite = [result["overflow"][1] for result in results]
    assert finite == [[True, False, True, True]] * 2  # a gradient shows the values of all ranks
    for scales, _, changed, saved in (result["overflow"] for result in results):
        assert scales == [8.0, 4.0, 4.0, 8.0]  # halved at the inf, doubled after two good steps
        assert changed == [False, True, True]
        assert saved == 8.0


@pytest.mark.parametrize("way", ["norm", "value", "override", "torch's own"])
def test_gradient_clipping_matches_plain_pytorch(results: list[dict[str, Any]], way: str) -> None:
    norms, expected = plain_clipped(way)
    for result in results:
        assert result["clipped"][way][0] == pytest.approx(norms, rel=1e-5)
    state = results[0]["clipped"][way][1]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
