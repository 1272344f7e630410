"""What a Lightning user takes for granted of a strategy: loops, callbacks, loggers, optimizers, schedules, data."""

from __future__ import annotations

import contextlib
import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import Accuracy

from lightning_osdp.errors import ConfigurationError
from tests.support.lightning_contract import (
    CLASSES,
    FEATURES,
    HIDDEN,
    RANKS,
    Net,
    batches,
    build_seeded,
    global_batches,
    is_fake,
    make_planned_trainer,
    rows,
    train_plain,
)
from tests.support.ranks import run_ranks


class Evaluated(Net):
    """Every loop, with a note of what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.example_input_array = torch.zeros(2, FEATURES)
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        self.log("train_loss", loss, sync_dist=True)
        self.note("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", functional.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("never_better", float(self.global_rank), sync_dist=True)
        self.note("sanity" if self.trainer.sanity_checking else "validate", logits)

    def test_step(self, batch: Any, batch_index: int) -> None:
        self.log("test_loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_index: int) -> Tensor:
        return self(batch[0])

    def note(self, what: str, tensor: Tensor) -> None:
        if not is_fake(tensor) and what not in self.ran[-1:]:
            self.ran.append(what)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "never_better"}}


def loops(folder: str) -> dict[str, Any]:
    """Evaluation, fit with callbacks and loggers, evaluation of the best checkpoint, and another fit."""
    data, unseen = batches(4, 2), batches(2, 4, seed=5)
    module = build_seeded(Evaluated)
    best = ModelCheckpoint(f"{folder}/best", monitor="val_loss", save_last=True)
    throughput = ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)
    stop = EarlyStopping("never_better", patience=1, check_on_train_epoch_end=False)
    loggers = [CSVLogger(folder, "csv", "0"), TensorBoardLogger(folder, "board", "0", log_graph=True)]
    made = make_planned_trainer(
        folder, module, data, max_epochs=9, num_sanity_val_steps=1, logger=loggers, log_every_n_steps=2,
        callbacks=[best, stop, LearningRateMonitor(), throughput], enable_checkpointing=True,
    )  # fmt: skip
    before = made.validate(module, unseen, verbose=False)[0]
    made.fit(module, data, unseen)
    ran, steps, rate = [*module.ran], made.global_step, made.optimizers[0].param_groups[0]["lr"]
    tested = made.test(module, unseen, ckpt_path="best", verbose=False)[0]
    predicted = torch.cat(made.predict(module, unseen))
    made.fit_loop.max_epochs = 4
    made.should_stop = False
    made.fit(module, data, unseen)
    return {
        "before": before,
        "ran": ran,
        "steps": steps,
        "rate": rate,
        "best": best.best_model_path,
        "tested": tested,
        "predicted": predicted,
        "steps after the second fit": made.global_step,
        "files": sorted(path.name for path in Path(folder, "best").iterdir()),
    }


def leftover(folder: str) -> Any:
    """Five batches, accumulated by two: the last one makes a step of its own."""
    module = build_seeded(Net)
    data = batches(5, 2)
    made = make_planned_trainer(folder, module, data, accumulation=2)
    made.fit(module, data)
    return made.global_step, made.strategy.lightning_module_state_dict()


class Scheduled(Net):
    """Asks how many steps there will be."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.steps = self.trainer.estimated_stepping_batches
        line = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=int(self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": line, "interval": "step"}}


def scheduled(folder: str) -> Any:
    """(estimated steps, steps made, last learning rate)."""
    data = batches(5, 2)
    module = build_seeded(Scheduled)
    made = make_planned_trainer(folder, build_seeded(Net), data, accumulation=2, max_epochs=2)
    made.fit(module, data)
    return module.steps, made.global_step, made.optimizers[0].param_groups[0]["lr"]


class Duel(pl.LightningModule):
    """Two optimizers by hand, each for its own half, the second with accumulation over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.maker(batch[0]))
        return -functional.cross_entropy(self.judge(made), batch[1]), functional.cross_entropy(
            self.judge(made.detach()), batch[1]
        )

    def training_step(self, batch: Any, batch_index: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        last = batch_index % 2 == 1
        with first.toggle_model():
            loss, _ = self.losses(batch)
            self.manual_backward(loss)
            self.clip_gradients(first, 0.05, "norm")
            first.step()
            first.zero_grad()
        with second.toggle_model(sync_grad=last):
            _, loss = self.losses(batch)
            self.manual_backward(loss / 2)
            if last:
                second.step()
                second.zero_grad()
        if last:
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.maker.parameters(), lr=0.01)
        second = torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.5)]


def plain_duel() -> dict[str, Tensor]:
    """The same in one process on the global batches."""
    module = build_seeded(Duel)
    (first, second), (scheduler,) = module.configure_optimizers()
    for index, batch in enumerate(global_batches(batches(6, 4))):
        first.zero_grad()
        gradients = torch.autograd.grad(module.losses(batch)[0], list(module.maker.parameters()))
        for parameter, gradient in zip(module.maker.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(module.maker.parameters(), 0.05)
        first.step()
        gradients = torch.autograd.grad(module.losses(batch)[1] / 2, list(module.judge.parameters()))
        for parameter, gradient in zip(module.judge.parameters(), gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if index % 2 == 1:
            second.step()
            second.zero_grad()
            scheduler.step()
    return module.state_dict()


def duel(folder: str) -> list[dict[str, Tensor]]:
    """Under two plans: each half is sharded in one of them."""
    states = []
    for shift in (1, 2):
        module = build_seeded(Duel)
        data = batches(6, 4)
        made = make_planned_trainer(folder, module, data, shift=shift)
        made.fit(module, data)
        states.append(made.strategy.lightning_module_state_dict())
    return states


class Seen(Net):
    """Writes down which rows it was given, and its replicated gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if not is_fake(loss):
            self.rows.append(batch[0])
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.second.weight.grad.clone())


def sampled(folder: str) -> Any:
    """A shuffled loader, without a sampler of its own."""
    data = DataLoader(rows(18), batch_size=3, shuffle=True)
    module = build_seeded(Seen)
    made = make_planned_trainer(folder, build_seeded(Net), data, max_epochs=2, use_distributed_sampler=True)
    made.fit(module, data)
    sampler = made.train_dataloader.sampler
    facts = (type(sampler).__name__, sampler.num_replicas, sampler.rank, made.num_devices, made.num_nodes)
    return facts, torch.stack(module.rows), torch.stack(module.gradients)


class Rare(Net):
    """A layer that runs on both ranks, on the second alone, or on none."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(HIDDEN, HIDDEN)

    def loss(self, batch: Any, index: int, rank: int) -> Tensor:
        hidden = torch.tanh(self.first(batch[0]))
        if index % 3 == 0 or (index % 3 == 1 and rank == 1):
            hidden = hidden + self.rare(hidden)
        return functional.cross_entropy(self.last(torch.tanh(self.second(hidden))), batch[1])

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.loss(batch, batch_index, self.global_rank)


def rare(folder: str) -> Any:
    """Replicated: FairScale's units wait for all ranks, so a unit that one rank leaves out must be replicated."""
    data = batches(6, 2)
    module = build_seeded(Rare)
    made = make_planned_trainer(folder, module, data, shift=1)  # first zdp2, rare zdp is moved to dp below
    plan = made.strategy._given_plan
    operators = tuple(
        op.model_copy(update={"slices": ("dp",), "unit": ""}) if op.name == "rare" else op for op in plan.operators
    )
    made.strategy._given_plan = type(plan).model_validate(plan.model_copy(update={"operators": operators}).model_dump())
    made.fit(module, data)
    return made.strategy.lightning_module_state_dict()


def plain_rare() -> dict[str, Tensor]:
    """The mean over ranks of what each would see."""
    module = build_seeded(Rare)
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(global_batches(batches(6, 2))):
        optimizer.zero_grad()
        shares = [[tensor[rank::RANKS] for tensor in batch] for rank in range(RANKS)]
        torch.stack([module.loss(share, index, rank) for rank, share in enumerate(shares)]).mean().backward()
        optimizer.step()
    return module.state_dict()


class Tuned(pl.LightningModule):
    """A backbone that BackboneFinetuning freezes at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def finetuned(folder: str) -> list[dict[str, Tensor]]:
    """The backbone is unfrozen in the second of three epochs, whether sharded or not."""
    states = []
    for shift in (0, 1, 2):
        callback = pl.callbacks.BackboneFinetuning(
            1, lambda epoch: 1.0, backbone_initial_lr=0.05, should_align=False, verbose=False
        )
        data = batches(3, 2)
        probe = build_seeded(Tuned)
        probe.backbone.requires_grad_(False)
        made = make_planned_trainer(folder, probe, data, callbacks=[callback], max_epochs=3, shift=shift)
        module = build_seeded(Tuned)
        made.fit(module, data)
        states.append(made.strategy.lightning_module_state_dict())
    return states


def plain_finetuned() -> dict[str, Tensor]:
    """By hand, with what the callback's settings come to."""
    module = build_seeded(Tuned)
    module.backbone.requires_grad_(False)
    optimizer = module.configure_optimizers()
    for epoch in range(3):
        if epoch == 1:
            module.backbone.requires_grad_(True)
            optimizer.add_param_group({"params": list(module.backbone.parameters()), "lr": 0.05})
        for batch in global_batches(batches(3, 2)):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    return module.state_dict()


class PartlyCompiled(Net):
    """One layer goes through torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.compile(self.second, backend="eager")


def compiled(folder: str) -> Any:
    """(mode of the compiled layer, final state)."""
    data = batches(3, 2)
    module = build_seeded(PartlyCompiled)
    made = make_planned_trainer(folder, build_seeded(PartlyCompiled), data)
    made.fit(module, data)
    modes = {op.name: str(op.slices[0]) for op in made.strategy.execution_plan.operators}
    return modes, made.strategy.lightning_module_state_dict()


class Checkpointed(pl.LightningModule):
    """A model of transformers that recomputes its blocks by itself."""

    def __init__(self, recompute: bool = True) -> None:
        super().__init__()
        import transformers

        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=8, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(config)
        if recompute:
            self.model.activation_checkpointing_enable()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tokens() -> DataLoader[Any]:
    data = TensorDataset(torch.randint(0, 31, (16, 8), generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
    return DataLoader(data, batch_size=2, sampler=sampler)


def checkpointed(folder: str) -> list[dict[str, Tensor]]:
    """Under three plans, so that every block has units of every mode."""
    states = []
    for shift in range(3):
        module = build_seeded(Checkpointed)
        made = make_planned_trainer(folder, module, tokens(), shift=shift)
        made.fit(module, tokens())
        states.append(made.strategy.lightning_module_state_dict())
    return states


def plain_checkpointed() -> dict[str, Tensor]:
    module = build_seeded(Checkpointed, recompute=False)
    optimizer = module.configure_optimizers()
    for batch in global_batches(tokens()):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return module.state_dict()


class Normalised(Net):
    """With a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(self.first(x))))


class Weightless(pl.LightningModule):
    """Has nothing to train."""

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("sum", batch[0].sum(), sync_dist=True, reduce_fx="sum")


def catch_fit_error(folder: str, module: Any, fit: Any = None, **options: Any) -> str:
    """The error's class and words."""
    data = batches(3, 2)
    made = make_planned_trainer(folder, build_seeded(Net), data, **options)
    try:
        made.fit(module if fit is None else fit, data)
    except (ConfigurationError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(folder: str) -> dict[str, str]:
    """What can't work, and says so."""
    in_place = build_seeded(Net)
    in_place.compile(backend="eager")
    shared = build_seeded(Net)
    shared.register_buffer("shadow", shared.second.weight.data[1:])
    wrapped, lazy, scripted = build_seeded(Net), build_seeded(Net), build_seeded(Net)
    lazy.second = nn.LazyLinear(8)
    sparse = build_seeded(Net)
    sparse.register_buffer("edges", torch.eye(3).to_sparse())
    scripted.second = torch.jit.script(scripted.second)
    wrapped.second = nn.parallel.DistributedDataParallel(wrapped.second)
    return {
        "whole compiled": catch_fit_error(folder, None, torch.compile(build_seeded(Net), backend="eager")),
        "compiled in place": catch_fit_error(folder, in_place),
        "sync_batchnorm": catch_fit_error(folder, build_seeded(Normalised), sync_batchnorm=True),
        "64-true": catch_fit_error(folder, build_seeded(Net), precision="64-true"),
        "wrapped": catch_fit_error(folder, wrapped),
        "shared memory": catch_fit_error(folder, shared),
        "lazy": catch_fit_error(folder, lazy),
        "sparse": catch_fit_error(folder, sparse),
        "scripted": catch_fit_error(folder, scripted),
    }


def others(folder: str) -> dict[str, Any]:
    """A module without parameters, and sync_batchnorm where there is no batch norm."""
    data = batches(2, 2)
    made = make_planned_trainer(folder, build_seeded(Net), data, sync_batchnorm=True)
    made.fit(build_seeded(Net), data)
    again = make_planned_trainer(folder, build_seeded(Net), data)
    return {"steps": made.global_step, "sum": again.validate(Weightless(), data, verbose=False)[0]["sum"]}


SCENARIOS = (loops, leftover, scheduled, duel, sampled, rare, finetuned, compiled, checkpointed, refusals, others)


def run_scenarios(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All in the same processes, since starting them takes longest."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    results = {}
    for scenario in SCENARIOS:
        Path(folder, scenario.__name__).mkdir(exist_ok=True)
        dist.barrier()
        with contextlib.chdir(folder):
            results[scenario.__name__] = scenario(f"{folder}/{scenario.__name__}")
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs write."""
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(run_scenarios, RANKS, str(folder))


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same keys in the same order, same values but for rounding."""
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_trainer_loops_run_in_order_and_stop_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        run = result["loops"]
        assert run["ran"] == ["validate", "sanity", "train", "validate", "train", "validate"]
        assert run["steps"] == 8  # two epochs: EarlyStopping
        assert run["steps after the second fit"] == 12  # EarlyStopping remembers: one more epoch
        assert run["best"] == results[0]["loops"]["best"]
        assert run["tested"] == results[0]["loops"]["tested"]


def test_reduce_lr_on_plateau_lowers_learning_rate_on_all_ranks(results: list[dict[str, Any]]) -> None:
    assert [result["loops"]["rate"] for result in results] == [0.05, 0.05]


def test_best_checkpoint_test_and_predict_match_plain_training(results: list[dict[str, Any]]) -> None:
    run = results[0]["loops"]
    checkpoint = torch.load(run["best"], weights_only=True)
    plain = build_seeded(Net)
    assert checkpoint["epoch"] == 0
    train_plain(plain, batches(4, 2))
    unseen = global_batches(batches(2, 4, seed=5))
    loaded = Evaluated()
    loaded.load_state_dict(checkpoint["state_dict"])
    assert_same(checkpoint["state_dict"], loaded.state_dict() | plain.state_dict())
    with torch.no_grad():
        losses = [functional.cross_entropy(loaded(points), labels) for points, labels in unseen]
        outputs = [result["loops"]["predicted"] for result in results]
        assert run["tested"]["test_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
        for rank, output in enumerate(outputs):
            share = torch.cat([points[rank::RANKS] for points, _ in unseen])
            torch.testing.assert_close(output, loaded(share), rtol=1e-5, atol=1e-6)


def test_validation_metrics_are_reduced_over_all_ranks(results: list[dict[str, Any]]) -> None:
    plain = build_seeded(Net)
    with torch.no_grad():
        points, labels = rows(16, seed=5).tensors
        accuracy = float((plain(points).argmax(1) == labels).float().mean())
        loss = float(functional.cross_entropy(plain(points), labels))
    for result in results:
        assert result["loops"]["before"]["accuracy"] == pytest.approx(accuracy)
        assert result["loops"]["before"]["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert result["loops"]["before"]["never_better"] == 0.5


def test_loggers_and_monitors_write_metrics_and_last_checkpoint(results: list[dict[str, Any]], folder: Path) -> None:
    with (folder / "loops" / "csv" / "0" / "metrics.csv").open() as file:
        columns = set(next(csv.reader(file)))
    assert {"train_loss", "val_loss", "accuracy", "lr-SGD", "train/device/samples_per_sec"} <= columns
    assert EventAccumulator(str(folder / "loops" / "board" / "0")).Reload().Tags()["graph"]
    assert "last.ckpt" in results[0]["loops"]["files"]


def test_accumulation_with_leftover_batch_makes_extra_step(results: list[dict[str, Any]]) -> None:
    plain = build_seeded(Net)
    optimizer = plain.configure_optimizers()
    micro = global_batches(batches(5, 2))
    for group in (micro[:2], micro[2:4], micro[4:]):
        optimizer.zero_grad()
        for batch in group:
            (functional.cross_entropy(plain(batch[0]), batch[1]) / 2).backward()
        optimizer.step()
    steps, state = results[0]["leftover"]
    assert steps == 3
    assert_same(state, plain.state_dict())
    assert results[1]["leftover"][1] == {}


def test_estimated_stepping_batches_accounts_for_accumulation(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["scheduled"] == (6, 6, pytest.approx(0.0, abs=1e-9))


def test_manual_optimization_with_two_optimizers_matches_plain_training(results: list[dict[str, Any]]) -> None:
    expected = plain_duel()
    for state in results[0]["duel"]:
        assert_same(state, expected)


def test_distributed_sampler_gives_each_row_to_one_rank_per_epoch(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result["sampled"][0] == ("DistributedSampler", RANKS, rank, RANKS, 1)
    seen = torch.stack([result["sampled"][1] for result in results])  # (ranks, epochs x 3 steps, 3 rows, FEATURES)
    every = {tuple(row) for row in rows(18).tensors[0].tolist()}
    for epoch in seen.chunk(2, dim=1):
        assert {tuple(row) for row in epoch.reshape(-1, FEATURES).tolist()} == every
    first, second = (set(map(tuple, half[0].reshape(-1, FEATURES).tolist())) for half in seen.chunk(2, dim=1))
    assert first != second  # another order in another epoch


def test_replicated_gradients_are_equal_on_all_ranks(results: list[dict[str, Any]]) -> None:
    first, second = (result["sampled"][2] for result in results)
    assert first.abs().sum() > 0
    assert torch.equal(first, second)


def test_layer_unused_by_some_ranks_or_steps_matches_plain_training(results: list[dict[str, Any]]) -> None:
    assert_same(results[0]["rare"], plain_rare())


def test_backbone_finetuning_trains_unfrozen_layers_like_plain_training(results: list[dict[str, Any]]) -> None:
    expected = plain_finetuned()
    for state in results[0]["finetuned"]:
        assert_same(state, expected)


def test_compiled_layer_stays_replicated_and_matches_plain_training(results: list[dict[str, Any]]) -> None:
    modes, state = results[0]["compiled"]
    assert modes["second._orig_mod"] == "dp"
    assert "zdp" in modes.values()
    plain = build_seeded(Net)
    train_plain(plain, batches(3, 2))
    assert_same({name.replace("_orig_mod.", ""): value for name, value in state.items()}, plain.state_dict())


def test_transformers_gradient_checkpointing_matches_plain_training(results: list[dict[str, Any]]) -> None:
    expected = plain_checkpointed()
    for state in results[0]["checkpointed"]:
        assert_same(state, expected)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("whole compiled", "RuntimeError: Using a compiled model is incompatible with"),
        ("compiled in place", "ConfigurationError: Net is compiled as a whole"),
        ("sync_batchnorm", "ConfigurationError: sync_batchnorm=True: PyTorch synchronises batch norms (norm) on GPUs"),
        ("64-true", "ConfigurationError: precision='64-true' is not supported: use '32-true', 'bf16-mixed'"),
        (
            "wrapped",
            "ConfigurationError: second is wrapped in DistributedDataParallel, which reduces its gradients by itself: ",
        ),
        (
            "shared memory",
            "ConfigurationError: second.weight and shadow lie in the same memory, which sharding would part: ",
        ),
        (
            "lazy",
            "ConfigurationError: second.weight (LazyLinear) has no shape before a first batch, and DDP would need",
        ),
        ("sparse", "ConfigurationError: edges (Net) is a sparse tensor, which neither OSDPStrategy nor DDP sends"),
    ],
)
def test_fit_with_unsupported_feature_raises_error_with_reason(
    results: list[dict[str, Any]], what: str, words: str
) -> None:
    for result in results:
        assert result["refusals"][what].startswith(words)


def test_module_without_parameters_or_batch_norms_runs(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["others"]["steps"] == 2
        assert result["others"]["sum"] == pytest.approx(float(rows(8).tensors[0].sum()), rel=1e-4)
