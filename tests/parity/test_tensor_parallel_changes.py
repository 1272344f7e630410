"""What else happens to tensor parallel operators: other plans between steps, reads outside, copies, an end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope
from lightning_osdp.state.guarded_parameter import is_guarded
from tests.support.models import two_groups
from tests.support.ranks import run_ranks
from tests.support.tensor_models import (
    ATTENTION_SPLITS,
    FEATURES,
    SPLITS,
    Attending,
    Sample,
    SelfAttention,
    Wide,
    loss_of,
    make_sample,
    tensor_plan,
)

EVERYTHING = dict.fromkeys(("embed", "tags", "sets", "mlp", "conv", "head"), 2)
ZDP = {name: Mode.ZDP for name in SPLITS if name != "sets"}
RANKS, STEPS = 2, 6


def model_of(seed: int = 1) -> tuple[Wide, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Wide()
    optimizer = two_groups(model, lr=3e-3)
    for group in optimizer.param_groups:
        group["eps"] = 1e-4
    return model, optimizer


def batch_of(step: int, rank: int) -> Sample:
    return make_sample(100 * step + rank, 4, 6)


def penalized_loss(model: Wide, sample: Sample) -> Tensor:
    """Reads weights outside of their operators."""
    weights = (model.embed.weight, model.mlp.down.weight, model.head.weight)
    return loss_of(model, sample) + 0.01 * sum(weight.square().sum() for weight in weights)


def step_of(engine: FairScaleEngine, model: nn.Module, optimizer: Any, sample: Sample, loss: Any = loss_of) -> None:
    engine.before_forward()
    optimizer.zero_grad()
    loss(model, sample).backward()
    engine.finish_backward()
    engine.before_optimizer_step(optimizer)
    optimizer.step()
    engine.after_optimizer_step()


def train_plain(
    loss: Any = loss_of, make: Any = model_of, change: Any = lambda step, model: None
) -> tuple[dict[str, Tensor], Any]:
    model, optimizer = make()
    for step in range(STEPS):
        change(step, model)
        optimizer.zero_grad()
        torch.stack([loss(model, batch_of(step, rank)) for rank in range(RANKS)]).mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def start(loss_steps: int, rank: int, **changes: Any) -> tuple[FairScaleEngine, Wide, torch.optim.Optimizer]:
    model, optimizer = model_of()
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, tensor_plan(EVERYTHING, RANKS, **changes), [optimizer])
    for step in range(loss_steps):
        step_of(engine, model, optimizer, batch_of(step, rank))
    return engine, model, optimizer


def change_plans(rank: int) -> Any:
    """Each step under another plan, the last ones restored to a plain module."""
    engine, model, optimizer = start(1, rank)
    others = [
        tensor_plan({}, RANKS, ZDP),
        tensor_plan({"mlp": 2, "tags": 2}, RANKS, ZDP),
        tensor_plan({}, RANKS),
        tensor_plan(EVERYTHING, RANKS),
    ]
    for step, plan in enumerate(others, 1):
        engine.apply_plan_change(plan, [optimizer])
        step_of(engine, model, optimizer, batch_of(step, rank))
    step_of(engine, model, optimizer, batch_of(STEPS - 1, rank))
    engine.restore([optimizer])
    assert not any(is_guarded(p) for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    return model.state_dict(), optimizer.state_dict()


class SelfAttentionWithScale(SelfAttention):
    """Has a weight of its own beside its projections, so that a unit lies around it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES)[None])

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(hidden * self.scale, mask)


def attending_model() -> tuple[Attending, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Attending()
    model.attention = SelfAttentionWithScale()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


SCOPE_PLANS = ((2, Mode.ZDP), (0, Mode.ZDP), (2, Mode.DP), (0, Mode.ZDP), (2, Mode.ZDP), (0, Mode.DP))
"""Degree of an attention, and mode of its own weight: one step under each."""


def change_units_of_a_scope(rank: int) -> Any:
    """A unit and a scope around one module come and go."""
    model, optimizer = attending_model()
    engine = FairScaleEngine(torch.device("cpu"))
    for step, (degree, mode) in enumerate(SCOPE_PLANS):
        plan = tensor_plan({"attention": degree} if degree else {}, RANKS, splits=ATTENTION_SPLITS)
        own = OperatorPlan(name="attention", slices=(mode,), num_parameters=0)
        plan = plan.model_copy(update={"operators": (*plan.operators, own)})
        if step:
            engine.apply_plan_change(plan, [optimizer])
        else:
            engine.apply(model, plan, [optimizer])
        step_of(engine, model, optimizer, batch_of(step, rank))
    engine.apply_plan_change(tensor_plan({"attention": 2}, RANKS, splits=ATTENTION_SPLITS), [optimizer])
    engine.restore([optimizer])
    assert not any("forward" in vars(module) for module in model.modules())
    return model.state_dict(), optimizer.state_dict()


def read_outside(rank: int) -> Any:
    engine, model, optimizer = start(0, rank)
    for step in range(STEPS):
        step_of(engine, model, optimizer, batch_of(step, rank), penalized_loss)
    return engine.model_state(), engine.optimizer_state(optimizer)


def look_at(rank: int) -> dict[str, Any]:
    """Reads, copies and replaced weights of a model that is compared with a plain one of the same values."""
    engine, model, _ = start(0, rank)
    plain, _ = model_of()
    sample, found = batch_of(3, 0), {}
    with torch.no_grad():
        expected = plain(sample)
        found["evaluation"] = torch.equal(model(sample), model(sample)) and torch.allclose(
            model(sample), expected, atol=1e-6
        )
        found["copy"] = torch.equal(copy.deepcopy(model)(sample), expected)
        weights = {name: parameter.detach() * 1.0 for name, parameter in model.named_parameters()}
        found["functional call"] = torch.equal(torch.func.functional_call(model, weights, (sample,)), expected)
    found["values"] = all(torch.equal(weights[name], p) for name, p in plain.named_parameters())
    found["shapes"] = [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    with engine.summon_full_params():
        found["summoned"] = all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        with torch.no_grad():
            model.mlp.down.weight.mul_(2.0)
            plain.mlp.down.weight.mul_(2.0)
        found["run while summoned"] = error_of(lambda: model(sample))
    with torch.no_grad():
        found["written"] = torch.allclose(model(sample), plain(sample), atol=1e-6)
        model.embed.weight[3] = 1.0
        plain.embed.weight[3] = 1.0
        found["changed in place"] = torch.allclose(model(sample), plain(sample), atol=1e-6)
        seen: list[Tensor] = []
        hook = model.mlp.up.register_forward_hook(lambda module, inputs, output: seen.append(output))
        found["hooked"] = torch.allclose(model(sample), plain(sample), atol=1e-6)
        found["seen by the hook"] = seen[0].shape == (4, 6, 32)
        hook.remove()
        rows = torch.linspace(-1, 1, 64).view(2, 32)
        found["row without columns"] = torch.allclose(model.mlp.down(rows), plain.mlp.down(rows), atol=1e-6)
        found["column without rows"] = torch.allclose(model.mlp.up(rows[:, :16]), plain.mlp.up(rows[:, :16]), atol=1e-6)
    model.embed.max_norm, model.sets.scale_grad_by_freq = 1.0, True
    found["late option"] = "max_norm changes whole rows" in error_of(lambda: model.embed(sample["tokens"]))
    found["late option of bags"] = "scale_grad_by_freq counts" in error_of(lambda: model.sets(sample["tokens"]))
    model.embed.max_norm, model.sets.scale_grad_by_freq = None, False
    loss_of(model, sample).backward()
    engine.finish_backward()
    loss_of(plain, sample).backward()
    gradients = zip(model.parameters(), plain.parameters(), strict=True)
    found["gradients"] = all(torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in gradients)
    return found


class Activated(nn.Module):
    """An MLP with a module between its linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.mlp = nn.GELU(), nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp["down"](self.act(self.mlp["up"](x)))


def normalized(forward: Any) -> Any:
    """What an adapter or a probe puts in the place of a forward: it needs all features of a row."""
    return lambda x: nn.functional.normalize(forward(x), dim=-1)


def normalize_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return nn.functional.normalize(output, dim=-1)


def replace_up(net: Activated) -> None:
    net.mlp["up"].forward = normalized(net.mlp["up"].forward)


def replace_down(net: Activated) -> None:
    net.mlp["down"].forward = normalized(net.mlp["down"].forward)


def replace_activation(net: Activated) -> None:
    net.act.forward = normalized(net.act.forward)


def hook_activation(net: Activated) -> None:
    net.act.register_forward_hook(normalize_output)


def hook_up(net: Activated) -> None:
    net.mlp["up"].register_forward_hook(normalize_output)


def hook_gradient(net: Activated) -> None:
    net.act.register_full_backward_hook(lambda module, to_input, of_output: (10 * to_input[0],))


CHANGES = (replace_up, replace_down, replace_activation, hook_activation, hook_up, hook_gradient)


def activated(change: Any, rank: int | None) -> list[Tensor]:
    """Gradients after a change amid training, of the mean over ranks; without a rank, of a plain module."""
    torch.manual_seed(1)
    net = Activated()
    if rank is not None:
        roles = {"mlp.up": (TensorRole.COLUMN, "mlp.down"), "mlp.down": (TensorRole.ROW, "mlp.down")}
        engine = FairScaleEngine(torch.device("cpu"))
        scopes = {"mlp.down": TensorScope(inner_modules=("act",))}
        engine.apply(net, tensor_plan({"mlp": 2}, RANKS, splits=roles, tensor_scopes=scopes))
    for step in range(3):
        if step == 1:
            change(net)
        net.zero_grad()
        inputs = [torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(RANKS)]
        if rank is None:
            torch.stack([net(x).square().mean() for x in inputs]).mean().backward()
        else:
            engine.before_forward()
            net(inputs[rank]).square().mean().backward()
            engine.finish_backward()
    return [parameter.grad * 1.0 for parameter in net.parameters()]


def change_amid_training(rank: int) -> dict[str, list[Tensor]]:
    return {change.__name__: activated(change, rank) for change in CHANGES}


class Dropping(nn.Module):
    """Its output is the mask of dropout times two, its gradient of the bias the sums of that over all rows."""

    def __init__(self, recomputed: str, reentrant: bool) -> None:
        super().__init__()
        self.recomputed, self.reentrant = recomputed, reentrant
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.up.weight.zero_()
            self.up.bias.fill_(1.0)
            self.down.weight.copy_(torch.eye(8))

    def again(self, kind: str, function: Any, x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant) if kind == self.recomputed else function(x)

    def forward(self, x: Tensor) -> Tensor:
        def drop(h: Tensor) -> Tensor:
            return nn.functional.dropout(1.0 * h, 0.5)

        def between(h: Tensor) -> Tensor:
            return self.again("between", drop, h)

        return self.again("all", lambda x: self.again("row", lambda h: self.down(between(h)), self.up(x)), x)


DROPPING = (("", False), ("between", False), ("between", True), ("all", False), ("all", True), ("row", False))


def drop_in_slices(rank: int) -> dict[tuple[str, bool], tuple[Tensor, Tensor, Tensor]]:
    """Output of this rank's rows, the bias's gradient, and the next random number; all ranks have one seed."""
    found = {}
    for how in DROPPING:
        net = Dropping(*how)
        roles = {"up": (TensorRole.COLUMN, "down"), "down": (TensorRole.ROW, "down")}
        engine = FairScaleEngine(torch.device("cpu"))
        engine.apply(net, tensor_plan({"up": 2, "down": 2}, RANKS, splits=roles))
        torch.manual_seed(3)
        engine.before_forward()
        y = net(torch.ones(4, 4, requires_grad=True))
        y.sum().backward()
        engine.finish_backward()
        found[how] = y.detach(), net.up.bias.grad * 1.0, torch.rand(1)
    return found


FROZEN_FIRST = ("embed", "mlp.up", "mlp.down", "head")


def unfreeze(step: int, model: nn.Module) -> None:
    """Train some weights in the later steps alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(step >= STEPS // 2 or not name.startswith(FROZEN_FIRST))


def unfreeze_amid_training(rank: int) -> Any:
    engine, model, optimizer = start(0, rank)
    for step in range(STEPS):
        unfreeze(step, model)
        step_of(engine, model, optimizer, batch_of(step, rank))
    return engine.model_state(), engine.optimizer_state(optimizer)


def sum_of_squares(model: nn.Module, rank: int) -> Tensor:
    """Of the logits of no sample on the first rank, and of three longer ones on the second."""
    return model(make_sample(0, 3 * rank, 5 + rank)).square().sum() + model.mlp(torch.ones(2, 0, FEATURES)).sum()


def run_without_samples(rank: int) -> dict[str, Tensor]:
    engine, model, _ = start(0, rank)
    engine.before_forward()
    sum_of_squares(model, rank).backward()
    engine.finish_backward()
    return {name: p.grad * 1.0 for name, p in model.named_parameters() if p.grad is not None}


def error_of(run: Any) -> str:
    try:
        run()
    except ShardingError as error:
        return str(error)
    return ""


def build_on_meta(rank: int) -> Any:
    states = []
    for plan in (tensor_plan(EVERYTHING, RANKS), tensor_plan({}, RANKS)):
        torch.manual_seed(7)
        with torch.device("meta"):
            model = nn.ModuleDict(
                {name: module for name, module in Wide().named_children() if name not in ("conv", "norm")}
            )
        engine = FairScaleEngine(torch.device("cpu"))
        operators = tuple(op for op in plan.operators if not op.name.startswith("conv"))
        scopes = {name: needs for name, needs in plan.tensor_scopes.items() if name != "conv"}
        engine.apply(model, plan.model_copy(update={"operators": operators, "tensor_scopes": scopes}))
        states.append(engine.model_state())
    return states


WORKS = (
    change_plans,
    change_units_of_a_scope,
    read_outside,
    look_at,
    build_on_meta,
    run_without_samples,
    change_amid_training,
    unfreeze_amid_training,
    drop_in_slices,
)


def run_all(rank: int, ranks: int) -> dict[str, Any]:
    return {work.__name__: work(rank) for work in WORKS}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS)


@pytest.mark.parametrize(
    ("name", "loss", "make"),
    [
        ("change_plans", loss_of, model_of),
        ("read_outside", penalized_loss, model_of),
        ("change_units_of_a_scope", loss_of, attending_model),
    ],
)
def test_weights_and_states_are_those_of_plain_training(
    runs: list[dict[str, Any]], name: str, loss: Any, make: Any
) -> None:
    (weights, optimizer), (expected, expected_optimizer) = runs[0][name], train_plain(loss, make)
    for key, weight in expected.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-6)
    for number, entries in expected_optimizer["state"].items():
        torch.testing.assert_close(optimizer["state"][number]["exp_avg"], entries["exp_avg"], rtol=1e-5, atol=1e-6)


def test_parameters_between_steps_are_those_of_the_plain_module(runs: list[dict[str, Any]]) -> None:
    for found in [run["look_at"] for run in runs]:
        assert "its parameters are shown whole" in found.pop("run while summoned")
        assert found == dict.fromkeys(found, True)


def test_values_of_a_module_built_on_the_meta_device_do_not_depend_on_tensor_parallelism(
    runs: list[dict[str, Any]],
) -> None:
    cut, plain = runs[0]["build_on_meta"]
    assert cut.keys() == plain.keys()
    assert all(torch.equal(cut[name], plain[name]) for name in plain)


def test_gradients_are_those_of_plain_training_where_a_rank_has_no_samples(runs: list[dict[str, Any]]) -> None:
    plain, _ = model_of()
    (sum_of_squares(plain, 1) / RANKS).backward()
    for found in [run["run_without_samples"] for run in runs]:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_weights_that_are_unfrozen_amid_training_train_from_then_on(runs: list[dict[str, Any]]) -> None:
    (weights, optimizer), (expected, expected_optimizer) = (
        runs[0]["unfreeze_amid_training"],
        train_plain(change=unfreeze),
    )
    for key, weight in expected.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-6)
    assert optimizer["state"].keys() == expected_optimizer["state"].keys()


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_between_operators_amid_training_sees_all_features(runs: list[dict[str, Any]], change: Any) -> None:
    expected = activated(change, None)
    for found in [run["change_amid_training"][change.__name__] for run in runs]:
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", DROPPING)
def test_ranks_of_one_seed_drop_other_places_of_their_slices_and_the_same_when_recomputed(
    runs: list[dict[str, Any]], how: tuple[str, bool]
) -> None:
    mask = torch.cat([run["drop_in_slices"][how][0] for run in runs]) / 2
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert (mask[:, :4] == mask[:, 4:]).all(1).float().mean() < 0.5
    torch.manual_seed(3)
    nn.functional.dropout(torch.ones(8, 4), 0.5)
    later = torch.rand(1)
    for run in runs:
        _, gradient, following = run["drop_in_slices"][how]
        torch.testing.assert_close(gradient, mask.sum(0) * 2 / RANKS)
        assert torch.equal(following, later)  # as many numbers are drawn as without slices
