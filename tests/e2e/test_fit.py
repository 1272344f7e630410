"""Whole runs through the Trainer on two gloo ranks."""

from __future__ import annotations

import gc
import json
import queue
import weakref
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_osdp import OSDPStrategy
from lightning_osdp.autotune import coordinator, measure
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import gpt_loss, two_groups
from tests.support.modules import DataDependent, FixedLoader, GPTModule, dataset, loader, trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

RANKS = 2


def build_seeded(cls: type[GPTModule] = GPTModule, **options: Any) -> GPTModule:
    torch.manual_seed(1)
    return cls(**options)


def fit(folder: str, module: GPTModule, data: Any = None, *, options: dict[str, Any] | None = None, **osdp: Any) -> Any:
    """Fits and returns the trainer with the strategy's settings in ``run_osdp``."""
    strategy = OSDPStrategy(cache=f"{folder}/cache", **osdp)
    made = trainer(folder, strategy, **(options or {}))
    made.fit(module, data)
    return made


class Noting(GPTModule):
    """Notes the form in which its optimizer makes each step."""

    def configure_optimizers(self) -> Any:
        self.forms: list[Any] = []
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda each, *_: self.forms.append(each.param_groups[0]["fused"]))
        return optimizer


def automatic(folder: str) -> dict[str, Any]:
    """``Trainer(strategy="osdp")``, then again with its measurements at hand."""
    module = build_seeded(Noting)
    first = trainer(folder, "osdp")
    first.fit(module)
    plan = first.strategy.execution_plan
    written = Path(folder, "osdp_plan.json").read_text()
    return {
        "plan": plan.to_json(),
        "written": written,
        "batch_sizes": module.batch_sizes,
        "forms": module.forms,
        "form_after": first.optimizers[0].param_groups[0]["fused"],
        "kept": [is_measured_again(folder, tolerance) for tolerance in (1e9, 0.0)],
    }


def is_measured_again(folder: str, tolerance: float) -> bool:
    """Whether another run measures anew, when cached links may be off by a factor of ``tolerance``."""
    usual, measure.PROBE_TOLERANCE = measure.PROBE_TOLERANCE, tolerance
    torch.distributed.barrier()  # the first rank has stored what the run before has taught
    (file,) = (file for file in Path(folder, "cache").iterdir() if "-" not in file.name)  # of ranks or steps
    before = json.loads(file.read_text())["compute"]  # what was planned is written at each new search
    torch.distributed.barrier()
    trainer(folder, "osdp", max_steps=1).fit(build_seeded())
    torch.distributed.barrier()
    measure.PROBE_TOLERANCE = usual
    return bool(json.loads(file.read_text())["compute"] != before)


def mixed_plan(folder: str) -> ExecutionPlan:
    """The automatic plan with its modes dealt out in turn."""
    plan = ExecutionPlan.from_json(Path(folder, "osdp_plan.json").read_text())
    shardable = [op.name for op in plan.operators if op.num_parameters > 1000]
    modes = {name: list(Mode)[i % 3] for i, name in enumerate(shardable)}
    operators = tuple(
        op.model_copy(update={"slices": (modes.get(op.name, Mode.DP),), "split_dim": None, "unit": ""})
        for op in plan.operators
    )
    update = {"operators": operators, "batch_size": 4, "accumulate_grad_batches": 2, "global_batch_size": 16}
    return plan.model_copy(update=update)


def with_plan(folder: str) -> dict[str, Any]:
    """Trains with a mixed plan from a file, clipping, a schedule, validation and a checkpoint; then resumes."""
    file = Path(folder, f"mixed-{torch.distributed.get_rank()}.json")
    file.write_text(mixed_plan(folder).to_json())
    module = build_seeded(rows=48, schedule=True, own_rows=True)
    checkpoint = pl.callbacks.ModelCheckpoint(
        f"{folder}/ckpt", "at-{step}", save_top_k=-1, save_on_train_epoch_end=True
    )
    options = {
        "max_steps": 6,
        "gradient_clip_val": 0.5,
        "callbacks": [checkpoint],
        "enable_checkpointing": True,
        "limit_val_batches": 2,
        "val_check_interval": 2,
        "use_distributed_sampler": False,  # Lightning's order of epochs is another one after a restart
    }
    made = fit(folder, module, options=options, plan=str(file))
    resumed = build_seeded(rows=48, schedule=True, own_rows=True)
    strategy = OSDPStrategy(plan=mixed_plan(folder))
    other = trainer(folder, strategy, **(options | {"callbacks": [], "enable_checkpointing": False}))
    other.fit(resumed, ckpt_path=f"{folder}/ckpt/at-step=3.ckpt")
    tested = other.validate(resumed, verbose=False)[0]["val_loss"]
    return {
        "losses": module.losses,
        "batch_sizes": module.batch_sizes,
        "state": made.strategy.lightning_module_state_dict(),
        "resumed_state": other.strategy.lightning_module_state_dict(),
        "resumed_losses": resumed.losses,
        "steps": other.global_step,
        "learning_rate": other.optimizers[0].param_groups[0]["lr"],
        "expected_learning_rate": made.optimizers[0].param_groups[0]["lr"],
        "val_loss": tested,
    }


def batch_sizes(folder: str) -> dict[str, Any]:
    """Ways in which the batch size reaches the data, or does not."""
    found: dict[str, Any] = {}
    osdp = {"batch_size": 3}
    module = build_seeded()
    made = fit(folder, module, loader(24, 4), **osdp)
    found["loader"] = (module.batch_sizes, made.train_dataloader.batch_size)

    class Data(pl.LightningDataModule):
        batch_size = 5

        def train_dataloader(self) -> Any:
            return loader(24, self.batch_size)

    module = build_seeded()
    del module.batch_size
    fit(folder, module, Data(), **osdp)
    found["datamodule"] = module.batch_sizes
    module = build_seeded(FixedLoader)
    with (
        pytest.warns(OSDPWarning, match="the batch size stays 2: batch_size is 4")
        if _is_rank_zero()
        else _null_context()
    ):
        fit(folder, module)
    found["fixed"] = module.batch_sizes
    module = build_seeded()
    made = fit(folder, module, global_batch_size=16, options={"max_steps": 2})
    found["global"] = [made.accumulate_grad_batches * size * RANKS for size in module.batch_sizes]
    sizes = []
    for data in (loader(24, 2), loader(24, 2), loader(24, 4)):  # the same Trainer, without and with another loader
        module.batch_sizes.clear()
        made.fit_loop.epoch_loop.max_steps += 2
        made.fit(module, data)
        sizes.append(2 * made.train_dataloader.batch_size * made.accumulate_grad_batches)
    found["later global"] = sizes
    workers = torch.utils.data.DataLoader(dataset(24), batch_size=4, shuffle=True, num_workers=1, drop_last=True)
    module = build_seeded()
    made = fit(folder, module, workers, options={"max_steps": 1}, **osdp)
    kept = made.train_dataloader
    found["kept"] = (kept.num_workers, kept.drop_last, kept.batch_size, kept.sampler.shuffle)
    return found


def untraceable(folder: str) -> list[int]:
    """A step that can't be traced is run for real once, with a warning, and then trains as usual."""
    module = build_seeded(DataDependent)
    with pytest.warns(OSDPWarning, match="can't be traced on fake tensors"):
        fit(folder, module, batch_size=4)
    return module.batch_sizes


class Counted(GPTModule):
    """Counts its real steps, those of its copies included."""

    steps: ClassVar[queue.SimpleQueue[int]] = queue.SimpleQueue()  # planning takes back what it adds to a list

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if not isinstance(loss, torch._subclasses.FakeTensor):
            Counted.steps.put(batch_index)
        return loss


def with_trials(folder: str) -> list[int]:
    """Real steps of runs of two steps: with trials, once more with their measurements, and without."""
    counts = []
    for trial_steps in (True, True, False):
        Counted.steps = queue.SimpleQueue()
        fit(
            f"{folder}/{trial_steps}",
            build_seeded(Counted),
            trial_steps=trial_steps,
            batch_size=4,
            options={"max_steps": 2},
        )
        counts.append(Counted.steps.qsize())
    return counts


class Cycle:
    """Garbage that only the garbage collector finds, once nothing else holds it."""

    def __init__(self) -> None:
        self.itself = self


def left_by_searches(folder: str) -> list[bool]:
    """Whether training begins without the garbage of the first rank's search: of a start that measures, and of one
    that only looks for another plan."""
    left: list[weakref.ref[Cycle]] = []
    gone: list[bool] = []
    search = coordinator.plan_or_fallback

    def leaving(*arguments: Any) -> ExecutionPlan:
        plan, cycle = search(*arguments), Cycle()
        left.append(weakref.ref(cycle))
        gc.collect()  # as old as garbage can get, since it is in use yet
        gc.disable()  # and not found by chance
        return plan

    class Begun(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            gc.enable()
            gone.append(all(cycle() is None for cycle in left))

    coordinator.plan_or_fallback = leaving
    for size in (4, 3):
        options = {"max_steps": 1, "callbacks": [Begun()]}
        fit(f"{folder}/left", build_seeded(), trial_steps=False, batch_size=size, options=options)
    coordinator.plan_or_fallback = search
    return [bool(left), *gone]


def half_precision(folder: str) -> tuple[list[float], list[float], str]:
    """Losses with and without autocast, and the dtype of the weights."""
    exact, half = build_seeded(), build_seeded()
    fit(folder, exact, plan=mixed_plan(folder), options={"max_steps": 3})
    fit(folder, half, plan=mixed_plan(folder), options={"max_steps": 3, "precision": "bf16-mixed"})
    return exact.losses, half.losses, str(half.model.head.weight.dtype)


def several(folder: str) -> dict[str, Any]:
    """Evaluation before training, two fits on one trainer, manual access to state in between."""
    module = build_seeded()
    made = trainer(folder, OSDPStrategy(cache=f"{folder}/cache", batch_size=4), limit_val_batches=1)
    before = made.validate(module, verbose=False)[0]["val_loss"]
    made.fit(module)
    made.fit_loop.epoch_loop.max_steps = 8
    made.fit(module)
    return {"before": before, "steps": made.global_step, "after": made.validate(module, verbose=False)[0]["val_loss"]}


class Nested(torch.nn.Module):
    """A layer that encloses all further ones."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.inner = Nested(levels - 1) if levels else torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(torch.tanh(self.layer(x)))
        return x + inner


class Deep(GPTModule):
    """Modules within modules, 200 deep."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Nested(200)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = self.model(batch).square().mean()
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def nested(folder: str) -> dict[str, Any]:
    """Losses of a module nested 200 deep, by DDP and with most of its layers sharded."""
    data = torch.utils.data.DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(2)), batch_size=2)
    by_ddp, module = build_seeded(Deep), build_seeded(Deep)
    trainer(folder, "ddp", max_steps=2).fit(by_ddp, data)
    plan = plan_for(Deep(), next(iter(data)), RANKS, "mixed", 2)
    fit(folder, module, data, plan=plan, options={"max_steps": 2})
    return {"losses": module.losses, "ddp": by_ddp.losses, "plan": plan.to_json()}


def _is_rank_zero() -> bool:
    return torch.distributed.get_rank() == 0


def _null_context() -> Any:
    import contextlib

    return contextlib.nullcontext()


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All runs in the same processes, since starting them takes longest."""
    import os

    os.environ["LIGHTNING_OSDP_CACHE"] = f"{folder}/cache"
    runs = (automatic, with_plan, half_precision, batch_sizes, untraceable, with_trials, left_by_searches, several)
    runs += (nested,)
    return {run.__name__: run(folder) for run in runs}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("runs")))


def test_trial_steps_run_on_first_start_only_and_not_when_disabled(results: list[dict[str, Any]]) -> None:
    for result in results:
        first_start, once_more, without = result["with_trials"]
        assert first_start > once_more == without == 2


def test_search_garbage_is_collected_before_training_starts(results: list[dict[str, Any]]) -> None:
    """Of 69 M parameters it is 9 MiB, and a start from known measurements was killed for want of them."""
    assert results[0]["left_by_searches"] == [True] * 3


def test_plan_is_equal_on_all_ranks_and_written_to_file(results: list[dict[str, Any]]) -> None:
    plans = [result["automatic"]["plan"] for result in results]
    assert plans[0] == plans[1] == results[0]["automatic"]["written"]
    plan = json.loads(plans[0])
    assert plan["predicted"]["step_time_s"] > 0
    assert plan["predicted"]["peak_memory_bytes"] <= plan["memory_limit_bytes"]
    assert set(results[0]["automatic"]["batch_sizes"]) == {plan["batch_size"]}
    assert set(results[0]["automatic"]["forms"]) == {True}, "Adam is not stepped in its fused form"
    assert results[0]["automatic"]["form_after"] is None


def test_cached_profile_is_reused_while_link_probe_agrees(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["automatic"]["kept"] == [False, True]


def global_batches() -> list[torch.Tensor]:
    """What two ranks see together in 2 epochs of 3 steps of 2 micro-batches of 4."""
    return [*dataset(48).tensors[0].split(16)] * 2


def test_training_with_a_mixed_plan_equals_plain_training(results: list[dict[str, Any]]) -> None:
    module = build_seeded()
    optimizer = two_groups(module)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 2e-3], total_steps=6)
    losses = []
    for batch in global_batches():
        optimizer.zero_grad()
        loss = gpt_loss(module.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    micro = torch.tensor([result["with_plan"]["losses"] for result in results])  # (ranks, steps x 2)
    torch.testing.assert_close(micro.mean(0).view(6, 2).mean(1), torch.tensor(losses), rtol=1e-5, atol=0)
    state = results[0]["with_plan"]["state"]
    assert list(state) == list(module.state_dict())
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6)
    assert results[1]["with_plan"]["state"] == {}


def test_resume_with_mixed_plan_continues_same_losses_and_state(results: list[dict[str, Any]]) -> None:
    run = results[0]["with_plan"]
    assert run["resumed_losses"] == pytest.approx(run["losses"][6:], rel=1e-6)
    assert run["steps"] == 6
    assert run["learning_rate"] == pytest.approx(run["expected_learning_rate"])
    for name, weight in run["state"].items():
        torch.testing.assert_close(run["resumed_state"][name], weight, rtol=1e-6, atol=1e-7)
    plain = build_seeded()
    plain.load_state_dict(run["state"])
    with torch.no_grad():
        losses = [gpt_loss(plain.model, rows) for rows in dataset(8, 9).tensors[0][:4].split(2)]
    assert run["val_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_batch_size_is_applied_to_dataloader_unless_it_is_fixed(results: list[dict[str, Any]]) -> None:
    found = results[0]["batch_sizes"]
    assert found["loader"] == ([3, 3, 3, 3], 3)
    assert set(found["datamodule"]) == {3}
    assert set(found["fixed"]) == {2}
    assert set(found["global"]) == {16}
    assert found["later global"] == [16, 16, 16]
    assert found["kept"] == (1, True, 3, True)


def test_untraceable_step_is_profiled_by_running_and_still_trains(results: list[dict[str, Any]]) -> None:
    assert results[0]["untraceable"] == [4, 4, 4, 4]  # training; the real steps were on a copy


def test_bf16_mixed_keeps_weights_in_float32(results: list[dict[str, Any]]) -> None:
    exact, half, dtype = results[0]["half_precision"]
    assert half != exact
    assert half == pytest.approx(exact, rel=2e-2)
    assert dtype == "torch.float32"


def test_module_nested_200_deep_trains_as_under_ddp(results: list[dict[str, Any]]) -> None:
    for found in results:
        run = found["nested"]
        assert run["losses"] == pytest.approx(run["ddp"], rel=1e-6)
        assert len(run["losses"]) == 2
        modes = [operator.slices[0] for operator in ExecutionPlan.from_json(run["plan"]).operators]
        assert len(modes) == 201
        assert modes.count(Mode.DP) < 100


def test_trainer_with_several_fits_and_validations_continues_training(results: list[dict[str, Any]]) -> None:
    run = results[0]["several"]
    assert run["steps"] == 8
    assert run["after"] != run["before"]
