"""After a run the module is whole, or says that it is not; later runs of the same and other Trainers take it over."""

from __future__ import annotations

import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_osdp import OSDPStrategy, ShardingError
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.lightning_contract import (
    RANKS,
    ManualOptimization,
    Net,
    batches,
    build_seeded,
    global_batches,
    is_fake,
    mixed_plan,
)
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

COUNT, SIZE = 3, 4
"""Batches of an epoch and rows of one, on each rank."""

POLICIES = ("dp", "zdp2", "zdp", "mixed", "slices", "in backward")


class EvaluatedNet(Net):
    """It logs the loss in a test, and can be told to fail."""

    fails_at = -1

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if batch_index == self.fails_at and not is_fake(loss):
            raise ValueError("a bad row")
        return loss

    def test_step(self, batch: Any, batch_index: int) -> None:
        self.log("loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True, on_epoch=True)


class ManualNet(ManualOptimization, EvaluatedNet):
    """It steps by itself."""


class LateNet(EvaluatedNet):
    """Its layers are made in configure_model, on the meta device inside a run."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.lr, self.losses = 0.1, []

    def configure_model(self) -> None:
        if not hasattr(self, "last"):
            torch.manual_seed(5)
            with torch.device("meta"):
                net = Net()
            self.first, self.second, self.last = net.first, net.second, net.last


def plan_for(policy: str, module: pl.LightningModule) -> ExecutionPlan:
    plan = mixed_plan(copy.deepcopy(module), next(iter(batches(COUNT, SIZE))), SIZE)
    changes: dict[str, Any] = {}
    if policy in list(WEIGHT_MODES):
        changes = {"slices": (Mode(policy),)}
    elif policy == "slices":
        changes = {"slices": (Mode.ZDP, Mode.ZDP2, Mode.DP), "split_dim": 0}
    elif policy == "in backward":
        changes = {"slices": (Mode.ZDP,)}
    operators = tuple(op.model_copy(update=changes) for op in plan.operators)
    extra = {"recomputed": ("second",)} if policy in ("mixed", "slices") else {}
    return plan.model_copy(update={"operators": operators, "update_in_backward": policy == "in backward", **extra})


def make_trainer(
    folder: str, plan: ExecutionPlan | None, epochs: int = 1, limit: Any = "auto", **options: Any
) -> pl.Trainer:
    strategy = "ddp" if plan is None else OSDPStrategy(plan=plan, memory_limit=limit)
    own = {"max_steps": -1, "max_epochs": epochs, "use_distributed_sampler": False}
    return trainer(folder, strategy, **(own | options))


def data() -> Any:
    return batches(COUNT, SIZE)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def momenta(optimizer: Any, module: nn.Module) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["momentum_buffer"].clone() for name, p in module.named_parameters()}


def leftovers(module: nn.Module) -> list[str]:
    """What a run has left on a module."""
    found = [name for name, inner in module.named_modules() if "forward" in vars(inner)]
    found += [name for name, inner in module.named_modules() if inner._forward_pre_hooks or inner._forward_hooks]
    found += [name for name, p in module.named_parameters() if vars(p) or type(p) is not nn.Parameter]
    return found + [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]


def refusal(module: nn.Module) -> str:
    with pytest.raises(ShardingError) as caught:
        module(torch.ones(1, 6))
    return str(caught.value)


def fit_and_go_on(folder: str, policy: str) -> dict[str, Any]:
    rank = dist.get_rank()
    module = build_seeded(EvaluatedNet)
    plan = plan_for(policy, module)
    first = make_trainer(folder, plan)
    first.fit(module, data())
    result: dict[str, Any] = {"weights": weights(module), "leftovers": leftovers(module)}
    result["momenta"] = momenta(first.optimizers[0], module)
    result["copy"] = weights(copy.deepcopy(module))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    result["file"] = torch.load(file, weights_only=True)
    if rank == 0:
        torch.save(module, io.BytesIO())
        result["rank zero"] = module(torch.ones(1, 6)).detach()
    path = f"{folder}/{policy}.ckpt"
    first.save_checkpoint(path)
    result["saved"] = torch.load(path, weights_only=True)
    result["tests"] = [
        first.test(module, data(), verbose=False)[0]["loss"],
        make_trainer(folder, plan).test(module, data(), verbose=False)[0]["loss"],
        make_trainer(folder, None).test(copy.deepcopy(module), data(), verbose=False)[0]["loss"],
        first.test(module, data(), ckpt_path=path, verbose=False)[0]["loss"],
    ]
    result["after tests"] = [weights(module), leftovers(module), momenta(first.optimizers[0], module)]
    other = copy.deepcopy(module)
    make_trainer(folder, None).fit(other, data())
    result["ddp"] = weights(other)
    first.fit_loop.max_epochs = 2
    first.fit(module, data(), ckpt_path=path)
    result["gone on"] = [weights(module), momenta(first.optimizers[0], module)]
    make_trainer(folder, plan).fit(module, data())
    result["new"] = weights(module)
    return result


def keep_sharded(folder: str) -> dict[str, Any]:
    """A module that does not fit whole."""
    module = build_seeded(EvaluatedNet)
    plan = plan_for("mixed", module)
    first = make_trainer(folder, plan, limit=1 << 20)
    first.fit(module, data())
    result: dict[str, Any] = {"forward": refusal(module)}
    with pytest.raises(ShardingError) as caught:
        module.last.weight.norm()
    result["read"] = str(caught.value)
    with pytest.raises(ShardingError) as caught:
        make_trainer(folder, None).fit(module, data())
    result["ddp"] = str(caught.value)
    path = f"{folder}/sharded.ckpt"
    first.save_checkpoint(path)
    result["saved"] = torch.load(path, weights_only=True)
    result["tests"] = [
        first.test(module, data(), verbose=False)[0]["loss"],
        make_trainer(folder, plan, limit=1 << 20).test(module, data(), verbose=False)[0]["loss"],
    ]
    make_trainer(folder, plan, limit=1 << 20).fit(module, data())
    make_trainer(folder, plan).test(module, data(), verbose=False)
    last = make_trainer(folder, plan)
    last.fit(module, data())
    result["gone on"] = weights(module)
    return result


def fail_and_go_on(folder: str, policy: str) -> dict[str, Any]:
    """The second step of a run fails on all ranks; another Trainer begins with the module as it is."""
    module = build_seeded(EvaluatedNet)
    plan = plan_for(policy, module)
    module.fails_at = 1
    failing = make_trainer(folder, plan)
    with pytest.raises(ValueError, match="a bad row") as caught:
        failing.fit(module, data())
    result: dict[str, Any] = {"error": str(caught.value)}
    if policy != "dp":
        result["forward"] = refusal(module)
    module.fails_at = -1
    make_trainer(folder, plan).fit(module, data())
    return result | {"weights": weights(module), "leftovers": leftovers(module)}


def fit_other(folder: str, kind: Any) -> dict[str, Any]:
    module = build_seeded(kind)
    if kind is LateNet:
        plan = plan_for("mixed", build_seeded(EvaluatedNet))
        plan = plan.model_copy(
            update={"operators": tuple(op.model_copy(update={"slices": (Mode.ZDP,)}) for op in plan.operators)}
        )
    else:
        plan = plan_for("mixed", module)
    first = make_trainer(folder, plan)
    first.fit(module, data())
    result = {"weights": weights(module), "leftovers": leftovers(module), "class": type(first.strategy.model) is kind}
    first.test(module, data(), verbose=False)
    make_trainer(folder, None).test(module, data(), verbose=False)
    return result | {"after": weights(module)}


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {policy: fit_and_go_on(folder, policy) for policy in POLICIES}
    results["sharded"] = keep_sharded(folder)
    results["failed"] = {policy: fail_and_go_on(folder, policy) for policy in ("dp", "zdp2", "zdp", "slices")}
    results["manual"] = fit_other(folder, ManualNet)
    results["late"] = fit_other(folder, LateNet)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("end")))


class Plain:
    """Plain training in this process: an epoch, from a state on."""

    def __init__(self, module: Any = None) -> None:
        self.module = module or build_seeded(EvaluatedNet)
        self.optimizer = self.module.configure_optimizers()

    def train(self, steps: int = COUNT) -> Plain:
        for points, labels in global_batches(data())[:steps]:
            self.optimizer.zero_grad()
            functional.cross_entropy(self.module(points), labels).backward()
            self.optimizer.step()
        return self

    def restart(self) -> Plain:
        """Go on with a new optimizer."""
        return Plain(copy.deepcopy(self.module))

    @property
    def loss(self) -> float:
        with torch.no_grad():
            losses = [
                functional.cross_entropy(self.module(points), labels) for points, labels in global_batches(data())
            ]
        return float(torch.stack(losses).mean())


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_module_and_optimizer_after_fit_are_whole_and_ordinary(policy: str, results: list[dict[str, Any]]) -> None:
    plain = Plain().train()
    expected = weights(plain.module)
    for rank, result in enumerate(one[policy] for one in results):
        for key in ("weights", "copy", "file"):
            assert_close(result[key], expected)
        assert result["leftovers"] == []
        assert_close(result["momenta"], momenta(plain.optimizer, plain.module))
        if rank == 0:
            assert_close(result["rank zero"], plain.module(torch.ones(1, 6)).detach())


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_saved_after_fit_holds_the_state_of_the_run(policy: str, results: list[dict[str, Any]]) -> None:
    plain = Plain().train()
    saved = results[0][policy]["saved"]
    assert_close(saved["state_dict"], weights(plain.module))
    state = saved["optimizer_states"][0]["state"]
    assert_close(
        [state[key]["momentum_buffer"] for key in sorted(state)], [*momenta(plain.optimizer, plain.module).values()]
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_tests_after_fit_equal_plain_ones_whoever_makes_them(policy: str, results: list[dict[str, Any]]) -> None:
    plain = Plain().train()
    for result in (one[policy] for one in results):
        assert result["tests"] == pytest.approx([plain.loss] * 4, rel=1e-5)
        after, left, states = result["after tests"]
        assert_close(after, weights(plain.module))
        assert_close(states, momenta(plain.optimizer, plain.module))
        assert left == []


@pytest.mark.parametrize("policy", POLICIES)
def test_later_fits_equal_plain_training(policy: str, results: list[dict[str, Any]]) -> None:
    """With the optimizer's state on the same Trainer, with a new optimizer on DDP and on another Trainer."""
    for result in (one[policy] for one in results):
        plain = Plain().train()
        assert_close(result["ddp"], weights(plain.restart().train().module))
        plain.train()
        assert_close(result["gone on"][0], weights(plain.module))
        assert_close(result["gone on"][1], momenta(plain.optimizer, plain.module))
        assert_close(result["new"], weights(plain.restart().train().module))


def test_module_that_does_not_fit_whole_says_so_and_later_runs_take_it_over(results: list[dict[str, Any]]) -> None:
    plain = Plain().train()
    loss = plain.loss
    assert_close(results[0]["sharded"]["saved"]["state_dict"], weights(plain.module))
    for result in (one["sharded"] for one in results):
        assert result["forward"].startswith("this module is sharded, since it does not fit whole: it needs")
        assert "hand it to a new Trainer with strategy='osdp'" in result["forward"]
        assert result["forward"] == result["read"] == result["ddp"]
        assert result["tests"] == pytest.approx([loss] * 2, rel=1e-5)
    plain = plain.restart().train().restart().train()
    for result in (one["sharded"] for one in results):
        assert_close(result["gone on"], weights(plain.module))


@pytest.mark.parametrize("policy", ["dp", "zdp2", "zdp", "slices"])
def test_module_of_failed_run_is_taken_over_by_another_trainer(policy: str, results: list[dict[str, Any]]) -> None:
    plain = Plain().train(steps=1).restart().train()
    for result in (one["failed"][policy] for one in results):
        assert "a bad row" in result["error"]
        if policy != "dp":
            assert result["forward"].startswith("this module is sharded, since its run ended with an error: go on with")
        assert_close(result["weights"], weights(plain.module))
        assert result["leftovers"] == []


def test_module_that_steps_by_itself_is_whole_after_fit(results: list[dict[str, Any]]) -> None:
    plain = Plain().train()
    for result in (one["manual"] for one in results):
        assert_close(result["weights"], weights(plain.module))
        assert_close(result["after"], weights(plain.module))
        assert result["leftovers"] == []
        assert result["class"]


def test_module_made_in_configure_model_is_whole_after_fit(results: list[dict[str, Any]]) -> None:
    first, second = (one["late"] for one in results)
    assert_close(first["weights"], second["weights"])
    assert_close(first["weights"], first["after"])
    assert first["leftovers"] == []
    assert {name: value.shape for name, value in first["weights"].items()} == {
        name: value.shape for name, value in weights(EvaluatedNet()).items()
    }
