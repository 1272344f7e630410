"""Whole runs with tensor parallel operators: equal to DDP, and their checkpoints go into any other plan and back."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_osdp import OSDPStrategy
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope, TensorSplit
from lightning_osdp.state.guarded_parameter import is_guarded, local_data
from tests.support.models import gpt_loss, two_groups
from tests.support.modules import GPTModule, dataset, trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

RANKS, GLOBAL_BATCH, ROWS, EPOCHS = 2, 8, 16, 2
BATCH = GLOBAL_BATCH // RANKS

ROLES = {"up": TensorRole.COLUMN, "down": TensorRole.ROW, "embed": TensorRole.EMBEDDING, "proj": TensorRole.LINEAR}


class TwoGroups(GPTModule):
    """Several groups of AdamW; looks at its parameters as users do."""

    def configure_optimizers(self) -> Any:
        return two_groups(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(self.trainer.strategy, OSDPStrategy):
            weight = self.model.blocks[0].up.weight
            read = weight.detach().norm()
            assert weight.shape == (128, 32)
            with self.trainer.strategy.summon_full_params():
                assert torch.equal(read, weight.norm())
            self.num_local = local_data(weight).numel()


class Manual(TwoGroups):
    """Accumulates two batches by hand, and clips by torch's own function."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = gpt_loss(self.model, batch[0])
        self.manual_backward(loss / 2)
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.losses.append(float(loss.detach()))
        if batch_idx % 2:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


def with_tensor_parallelism(plan: ExecutionPlan) -> ExecutionPlan:
    """The same with embeddings, projections and MLPs tensor parallel over all ranks."""
    degree = torch.distributed.get_world_size()

    def cut(operator: OperatorPlan) -> OperatorPlan:
        role = ROLES.get(operator.name.rpartition(".")[2])
        if role is None:
            return operator
        scope = f"{operator.name.rpartition('.')[0]}.down" if role.has_scope else None
        split = TensorSplit(degree=degree, role=role, scope=scope)
        return operator.model_copy(update={"slices": (Mode.TP,), "tensor": split})

    operators = tuple(cut(operator) for operator in plan.operators)
    scopes = {op.tensor.scope: TensorScope() for op in operators if op.tensor is not None and op.tensor.scope}
    return plan.model_copy(update={"operators": operators, "tensor_scopes": scopes})


def make_module(cls: type[GPTModule] = TwoGroups) -> GPTModule:
    torch.manual_seed(1)
    return cls(batch_size=BATCH, rows=ROWS, own_rows=True)


def fit(
    folder: str, strategy: Any, cls: type[GPTModule] = TwoGroups, save: str = "", resume: str = "", **options: Any
) -> tuple[GPTModule, pl.Trainer]:
    """Strategy: a policy of plans without tensor parallelism, ``tp``, or DDP's."""
    module = make_module(cls)
    if isinstance(strategy, str):
        batch = [dataset(ROWS).tensors[0][:BATCH]]
        policy, accumulation = "mixed" if "tp" in strategy else strategy, options.get("accumulate_grad_batches", 1)
        traced = make_module(cls).to(torch.bfloat16 if options.get("precision") == "bf16-true" else torch.float32)
        plan = plan_for(traced, batch, torch.distributed.get_world_size(), policy, BATCH, accumulation)
        plan = with_tensor_parallelism(plan) if "tp" in strategy else plan
        strategy = OSDPStrategy(plan=plan, save_format="sharded" if "sharded" in strategy else "full")
    callbacks = [pl.callbacks.ModelCheckpoint(f"{folder}/{save}", "{epoch}", save_top_k=-1)] if save else []
    values = {"max_steps": -1, "max_epochs": EPOCHS, "use_distributed_sampler": False} | options
    fitted = trainer(folder, strategy, callbacks=callbacks, enable_checkpointing=bool(save), **values)
    with torch.random.fork_rng():
        fitted.fit(module, ckpt_path=f"{folder}/{resume}" if resume else None)
    return module, fitted


def scaled_fp16() -> MixedPrecision:
    """Half precision with a loss scaler, as on a GPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(name: str, *args: Any, **options: Any) -> None:
        module, fitted = fit(folder, *args, **options)
        found[name] = {
            "losses": module.losses,
            "state": {key: value.clone() for key, value in module.state_dict().items()},
            "is whole": not any(is_guarded(p) for p in module.parameters()),
            "local": getattr(module, "num_local", None),
            "optimizer": fitted.strategy.optimizer_state(fitted.optimizers[0]) if name in ("ddp", "tp") else None,
        }

    note("ddp", DDPStrategy(), save="ddp")
    note("tp", "tp", save="full")
    note("tp, sharded files", "tp sharded", save="sharded")
    note("ddp into tp", "tp", resume="ddp/epoch=0.ckpt")
    note("tp into ddp", DDPStrategy(), resume="full/epoch=0.ckpt")
    note("tp into zdp", "zdp", resume="full/epoch=0.ckpt")
    note("sharded tp into zdp2", "zdp2", resume="sharded/epoch=0.ckpt")
    note("sharded tp into tp", "tp sharded", resume="sharded/epoch=0.ckpt")
    accumulation = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    note("accumulated by ddp", DDPStrategy(), **accumulation)
    note("accumulated by tp", "tp", **accumulation)
    note("manual by ddp", DDPStrategy(), Manual)
    note("manual by tp", "tp", Manual)
    note("values clipped by ddp", DDPStrategy(), gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    note("values clipped by tp", "tp", gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    note("bf16-true by ddp", DDPStrategy(), precision="bf16-true")
    note("bf16-true by tp", "tp", precision="bf16-true")
    note("fp16 by ddp", DDPStrategy(), plugins=[scaled_fp16()])
    note("fp16 by tp", "tp", plugins=[scaled_fp16()])
    note("bf16 by ddp", DDPStrategy(), precision="bf16-mixed")
    note("bf16 by tp", "tp", precision="bf16-mixed")
    return found


def load_all(rank: int, ranks: int, folder: str, policy: str) -> dict[str, Any]:
    """What ranks that hold other parts read from checkpoints of tensor parallel runs; nothing is left to train."""
    found = {}
    for name in ("full", "sharded"):
        module, fitted = fit(folder, policy, resume=f"{name}/epoch=0.ckpt", max_epochs=1, devices=ranks)
        found[name] = module.state_dict(), fitted.strategy.optimizer_state(fitted.optimizers[0])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("fits"))


@pytest.fixture(scope="module")
def runs(folder: str) -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS, folder)


@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        ("tp", "ddp", 1e-5),
        ("tp, sharded files", "ddp", 1e-5),
        ("accumulated by tp", "accumulated by ddp", 1e-5),
        ("manual by tp", "manual by ddp", 1e-5),
        ("values clipped by tp", "values clipped by ddp", 1e-5),
        ("bf16 by tp", "bf16 by ddp", 2e-2),
        ("bf16-true by tp", "bf16-true by ddp", 2e-2),
        ("fp16 by tp", "fp16 by ddp", 5e-3),
    ],
)
def test_run_with_tensor_parallel_operators_has_the_losses_and_weights_of_ddp(
    runs: list[dict[str, Any]], name: str, expected: str, tolerance: float
) -> None:
    for rank in range(RANKS):
        ours, ddp = runs[rank][name], runs[rank][expected]
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(ddp["losses"]), rtol=tolerance, atol=0)
        assert ours["is whole"]
        assert list(ours["state"]) == list(ddp["state"])
        for key, weight in ddp["state"].items():
            if tolerance > 1e-5:  # a rounding may turn the step of a single weight round
                assert (ours["state"][key] - weight).norm() <= tolerance * weight.norm(), key
            else:
                torch.testing.assert_close(ours["state"][key], weight, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(
    "name", ["ddp into tp", "tp into ddp", "tp into zdp", "sharded tp into zdp2", "sharded tp into tp"]
)
def test_checkpoint_goes_on_under_another_plan_as_if_nothing_had_been(runs: list[dict[str, Any]], name: str) -> None:
    for found in runs:
        losses = found["ddp"]["losses"]
        assert len(found[name]["losses"]) == len(losses) // 2
        torch.testing.assert_close(
            torch.tensor(found[name]["losses"]), torch.tensor(losses[len(losses) // 2 :]), rtol=1e-5, atol=0
        )
        for key, weight in found["ddp"]["state"].items():
            torch.testing.assert_close(found[name]["state"][key], weight, rtol=1e-5, atol=1e-6)


def test_optimizer_states_after_a_run_are_those_of_ddp(runs: list[dict[str, Any]]) -> None:
    states, expected = (runs[0][name]["optimizer"]["state"] for name in ("tp", "ddp"))
    assert states.keys() == expected.keys()
    for number, entries in expected.items():
        torch.testing.assert_close(states[number]["exp_avg"], entries["exp_avg"], rtol=1e-5, atol=1e-6)


def test_each_rank_holds_half_of_what_is_tensor_parallel(runs: list[dict[str, Any]]) -> None:
    assert [found["tp"]["local"] for found in runs] == [128 * 32 // RANKS] * RANKS


@pytest.mark.parametrize(("ranks", "policy"), [(3, "zdp"), (4, "tp")])
def test_checkpoints_are_read_by_another_number_of_ranks(
    runs: list[dict[str, Any]], folder: str, ranks: int, policy: str
) -> None:
    expected = torch.load(f"{folder}/ddp/epoch=0.ckpt", weights_only=True)
    loaded = run_ranks(load_all, ranks, folder, policy)[0]
    for name, (state, optimizer) in loaded.items():
        for key, weight in expected["state_dict"].items():
            torch.testing.assert_close(state[key], weight, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        entries = expected["optimizer_states"][0]["state"]
        assert optimizer["state"].keys() == entries.keys()
        for number, each in entries.items():
            torch.testing.assert_close(optimizer["state"][number]["exp_avg"], each["exp_avg"], rtol=1e-5, atol=1e-6)
            assert optimizer["state"][number]["step"] == each["step"]
