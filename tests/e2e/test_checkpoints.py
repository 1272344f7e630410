"""Checkpoints: exact into other plans, numbers of ranks, strategies and formats; refused where they don't fit."""

from __future__ import annotations

import itertools
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_osdp import OSDPStrategy
from lightning_osdp.cli.main import main
from lightning_osdp.errors import CheckpointError, ConfigurationError, OSDPError, ShardingError
from lightning_osdp.state.flat_layout import FlatPaddedLayout
from tests.support.models import gpt_loss, two_groups
from tests.support.modules import GPTModule, dataset, trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

GLOBAL_BATCH, EPOCHS = 8, 3
ROWS = 2 * GLOBAL_BATCH
"""Two steps an epoch."""


class Scheduled(GPTModule):
    """A schedule over all epochs, also where a run makes only some of them."""

    def configure_optimizers(self) -> Any:
        optimizer = two_groups(self)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 2e-3], total_steps=2 * EPOCHS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Reordered(GPTModule):
    """The same parameters in another order."""

    def configure_optimizers(self) -> Any:
        plain = two_groups(self)
        groups = [{**group, "params": group["params"][::-1]} for group in plain.param_groups]
        return torch.optim.AdamW(groups)


class Hooked(GPTModule):
    """Looks at the values that are saved, on the first rank, and renames on all."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["norm"] = float(checkpoint["state_dict"]["model.head.weight"].norm())
        checkpoint["state_dict"]["renamed"] = checkpoint["state_dict"].pop("model.head.weight")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["model.head.weight"] = checkpoint["state_dict"].pop("renamed")


def build_module(ranks: int, cls: type[GPTModule] = Scheduled) -> GPTModule:
    torch.manual_seed(1)
    return cls(batch_size=GLOBAL_BATCH // ranks, rows=ROWS, own_rows=True)


def fit_module(
    folder: str,
    module: GPTModule,
    ranks: int,
    policy: str = "mixed",
    *,
    epochs: int = EPOCHS,
    resume: str | None = None,
    save: str | None = None,
    strategy: Any = None,
    **osdp: Any,
) -> pl.Trainer:
    """Fits; ``save`` names a folder that gets a checkpoint after each epoch."""
    batch = dataset(ROWS).tensors[0][: GLOBAL_BATCH // ranks]
    if strategy is None:
        plan = plan_for(build_module(ranks, type(module)), [batch], ranks, policy, GLOBAL_BATCH // ranks)
        strategy = OSDPStrategy(plan=plan, **osdp)
    callbacks = [pl.callbacks.ModelCheckpoint(f"{folder}/{save}", "{epoch}", save_top_k=-1)] if save else []
    options = {"max_steps": -1, "max_epochs": epochs, "devices": ranks, "use_distributed_sampler": False}
    whole = trainer(folder, strategy, callbacks=callbacks, enable_checkpointing=bool(save), **options)
    with torch.random.fork_rng():
        whole.fit(module, ckpt_path=resume and f"{folder}/{resume}")
    return whole


def catch_error(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except OSDPError as error:
        return type(error).__name__, str(error)
    return "none", ""


def catch_any(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return str(error)
    return "none"


def refuse_memory(self: FlatPaddedLayout, full_tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def run_on_two_ranks(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Uninterrupted runs, what they save, and what DDP makes of it."""
    found: dict[str, Any] = {}
    module = build_module(ranks)
    done = fit_module(folder, module, ranks, save="full")
    found["losses"] = module.losses
    found["state"] = done.strategy.lightning_module_state_dict()
    found["optimizer"] = done.strategy.optimizer_state(done.optimizers[0])
    found["unwrapped keys"] = list(build_module(ranks).state_dict())
    other = build_module(ranks)
    fit_module(folder, other, ranks, "zdp", save="sharded", save_format="sharded", epochs=2)
    found["sharded losses"] = other.losses

    ddp = build_module(ranks)
    fit_module(folder, ddp, ranks, strategy=DDPStrategy(), save="ddp", epochs=2)
    found["ddp losses"] = ddp.losses
    for name, source, strategy in (
        ("ddp into osdp", "ddp/epoch=1.ckpt", None),
        ("osdp into ddp", "full/epoch=1.ckpt", DDPStrategy()),
        ("full again", "full/epoch=1.ckpt", None),
    ):
        module = build_module(ranks)
        fit_module(folder, module, ranks, "zdp2", resume=source, strategy=strategy)
        found[name] = module.losses
    if rank == 0:
        main(["consolidate", f"{folder}/sharded/epoch=1.ckpt", f"{folder}/whole.ckpt"])
    torch.distributed.barrier()
    module = build_module(ranks)
    fit_module(folder, module, ranks, resume="whole.ckpt", strategy=DDPStrategy())
    found["consolidated into ddp"] = module.losses
    return found


class ListsOpenFiles(Scheduled):
    """Lists the files that are open while it is trained."""

    def on_train_start(self) -> None:
        descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        self.open_files = [os.readlink(descriptor) for descriptor in descriptors if os.path.lexists(descriptor)]


def resume_and_save_both_formats(rank: int, ranks: int, folder: str, epoch: int) -> dict[str, Any]:
    """Goes on from both formats for one epoch, and saves both."""
    found = {}
    for kind, policy in (("full", "zdp"), ("sharded", "mixed")):
        module = build_module(ranks, ListsOpenFiles)
        path = f"{kind}/epoch={epoch}.ckpt" if epoch == 0 else f"{kind}-again/epoch={epoch}.ckpt"
        fit_module(folder, module, ranks, policy, epochs=epoch + 2, resume=path, save=f"{kind}-again", save_format=kind)
        found[kind] = module.losses
        found[f"{kind} open"] = [file for file in module.open_files if path in file]
    return found


class AtTrainEnd(pl.Callback):
    """Does something while the module is still sharded: after ``fit`` it is whole."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.work()


def try_loads(strategy: OSDPStrategy, source: str, rank: int, found: dict[str, Any]) -> None:
    """Loads that are refused and change nothing, or for which a rank has no memory."""
    optimizer = strategy.optimizers[0]
    before = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer)
    saved = torch.load(source, weights_only=True)
    saved["optimizer_states"] *= 2
    found["two optimizers"] = catch_error(lambda: strategy.load_model_state_dict(saved))
    saved["optimizer_states"] = saved["optimizer_states"][:1]
    saved["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(7, 7)
    found["another shape"] = catch_error(lambda: strategy.load_model_state_dict(saved))
    del saved["optimizer_states"]
    found["only weights"] = catch_error(lambda: strategy.load_model_state_dict(saved))
    after = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer)
    found["unchanged"] = all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    whole = torch.load(source, weights_only=True)
    shard = FlatPaddedLayout.shard
    for victim in range(torch.distributed.get_world_size()):
        began = time.monotonic()
        if rank == victim:
            FlatPaddedLayout.shard = refuse_memory  # type: ignore[method-assign]
        found[f"no memory on rank {victim}"] = catch_any(lambda: strategy.load_model_state_dict(whole))
        found[f"no memory on rank {victim} for moments"] = catch_any(lambda: strategy.load_optimizer_state_dict(whole))
        FlatPaddedLayout.shard = shard  # type: ignore[method-assign]
        found["seconds"] = max(found.get("seconds", 0.0), time.monotonic() - began)


def try_invalid_checkpoints(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """What is refused, by the run that finds it; then that it would have worked otherwise."""
    source = f"{folder}/full/epoch=1.ckpt"
    content = Path(source).read_bytes()
    if rank == 0:
        Path(folder, "cut.ckpt").write_bytes(content[:-1000])
        torch.save({"weights": {}}, f"{folder}/foreign.ckpt")
        Path(folder, "text.ckpt").write_text("hello")
        Path(folder, "empty-folder").mkdir()
        os.mkfifo(f"{folder}/pipe.ckpt")
        Path(folder, "circle").symlink_to(Path(folder, "circle"))
        flip = Path(folder, "sharded", "epoch=1.ckpt", "__1_0.distcp")
        damaged = bytearray(flip.read_bytes())
        damaged[len(damaged) // 2] ^= 255
        flip.write_bytes(damaged)
    torch.distributed.barrier()
    found: dict[str, Any] = {}
    for name, path in (
        ("cut", "cut.ckpt"),
        ("foreign", "foreign.ckpt"),
        ("text", "text.ckpt"),
        ("missing", "none.ckpt"),
        ("empty folder", "empty-folder"),
        ("pipe", "pipe.ckpt"),
        ("circle of links", "circle"),
        ("damaged folder", "sharded/epoch=1.ckpt"),
    ):
        found[name] = catch_error(lambda path=path: fit_module(folder, build_module(ranks), ranks, resume=path))  # type: ignore[misc]

    strategy = OSDPStrategy(plan=plan_for(build_module(ranks), [dataset(4).tensors[0]], ranks, "zdp", 4))
    options = {"devices": ranks, "use_distributed_sampler": False, "max_steps": 2}
    fitted = trainer(
        folder, strategy, callbacks=[AtTrainEnd(lambda: try_loads(strategy, source, rank, found))], **options
    )
    fitted.fit(build_module(ranks))
    thesis = Path(folder, "data", "thesis.txt")
    if rank == 0:
        thesis.parent.mkdir()
        thesis.write_text("years of work")
    torch.distributed.barrier()
    found["ordinary folder"] = catch_error(lambda: fitted.save_checkpoint(f"{folder}/data"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.remove_checkpoint(f"{folder}/data")
    found["removal"] = [str(warning.message) for warning in caught], thesis.read_text()
    found["unwritable"] = catch_error(lambda: fitted.save_checkpoint("/dev/full/a.ckpt"))
    for name, path in (("write to a pipe", "pipe.ckpt"), ("write to a circle", "circle/a.ckpt")):
        found[name] = catch_error(lambda path=path: fitted.save_checkpoint(f"{folder}/{path}"))  # type: ignore[misc]

    module = build_module(ranks, Hooked)
    fit_module(folder, module, ranks, save="hooked", epochs=1)
    fit_module(folder, build_module(ranks, Hooked), ranks, resume="hooked/epoch=0.ckpt", epochs=2)
    found["hooked"] = torch.load(f"{folder}/hooked/epoch=0.ckpt", weights_only=True)["norm"]
    ordered = fit_module(folder, build_module(ranks, GPTModule), ranks, save="ordered", epochs=1)
    other = fit_module(folder, build_module(ranks, Reordered), ranks, resume="ordered/epoch=0.ckpt", epochs=1)
    found["by name"] = [second_moments_by_name(ordered), second_moments_by_name(other)]
    return found


def second_moments_by_name(made: pl.Trainer) -> dict[str, torch.Tensor]:
    """The second moments of an optimizer, by the name of their parameter."""
    state = made.strategy.optimizer_state(made.optimizers[0])
    if not state:
        return {}
    return {name: state["state"][number]["exp_avg_sq"] for number, name in enumerate(state["param_names"])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def two_rank_results(folder: str) -> list[dict[str, Any]]:
    return run_ranks(run_on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def plain_run(two_rank_results: list[dict[str, Any]]) -> tuple[list[float], GPTModule, Any]:
    """Losses of all steps, the module and the optimizer of a run without Lightning."""
    module = build_module(1)
    optimizer = two_groups(module)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 2e-3], total_steps=2 * EPOCHS)
    losses = []
    for batch in [*dataset(ROWS).tensors[0].split(GLOBAL_BATCH)] * EPOCHS:
        optimizer.zero_grad()
        loss = gpt_loss(module.model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, module, optimizer


def mean(results: list[dict[str, Any]], name: str) -> list[float]:
    return torch.tensor([result[name] for result in results]).mean(0).tolist()


Plain = tuple[list[float], GPTModule, Any]


def test_training_uninterrupted_matches_plain_pytorch_losses(
    two_rank_results: list[dict[str, Any]], plain_run: Plain
) -> None:
    assert mean(two_rank_results, "losses") == pytest.approx(plain_run[0], rel=1e-5)


def test_resume_with_other_plan_or_ddp_continues_same_losses(two_rank_results: list[dict[str, Any]]) -> None:
    for name in ("full again", "ddp into osdp", "osdp into ddp"):
        for result in two_rank_results:
            assert result[name] == pytest.approx(result["losses"][4:], rel=1e-6), name


def test_state_dicts_match_plain_module_and_are_on_rank_zero_only(
    two_rank_results: list[dict[str, Any]], plain_run: Plain
) -> None:
    assert list(two_rank_results[0]["state"]) == two_rank_results[0]["unwrapped keys"]
    assert two_rank_results[1]["state"] == two_rank_results[1]["optimizer"] == {}
    module = build_module(1)
    module.load_state_dict(two_rank_results[0]["state"])
    optimizer = two_groups(module)
    optimizer.load_state_dict(two_rank_results[0]["optimizer"])
    for ours, theirs in zip(optimizer.state.values(), plain_run[2].state.values(), strict=True):
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-6)
    names = [n for n, p in module.named_parameters() if p.dim() >= 2 and not n.endswith("position")]
    assert two_rank_results[0]["optimizer"]["param_names"][: len(names)] == names


def test_full_checkpoint_loads_into_plain_torch_and_lightning(
    two_rank_results: list[dict[str, Any]], folder: str
) -> None:
    for name in ("full/epoch=2.ckpt", "whole.ckpt"):
        path = f"{folder}/{name}"
        checkpoint = torch.load(path, weights_only=True)
        assert list(checkpoint["state_dict"]) == two_rank_results[0]["unwrapped keys"]
        module = GPTModule.load_from_checkpoint(path, map_location="cpu")
        assert all(torch.equal(value, checkpoint["state_dict"][n]) for n, value in module.state_dict().items())
    for n, value in torch.load(f"{folder}/full/epoch=2.ckpt", weights_only=True)["state_dict"].items():
        assert torch.equal(value, two_rank_results[0]["state"][n])


def test_load_from_checkpoint_of_sharded_folder_says_how_to_make_a_file(
    two_rank_results: list[dict[str, Any]], folder: str
) -> None:
    path = f"{folder}/sharded/epoch=1.ckpt"
    for given in (path, Path(path), f"file://{path}"):
        with pytest.raises(CheckpointError, match=r"is a folder of save_format='sharded'.*`osdp consolidate .*epoch=1"):
            GPTModule.load_from_checkpoint(given)
    with pytest.raises(FileNotFoundError):  # Lightning's own
        GPTModule.load_from_checkpoint(f"{folder}/sharded/missing.ckpt")


def test_sharded_checkpoint_stores_each_element_once_from_both_ranks(
    two_rank_results: list[dict[str, Any]], folder: str
) -> None:
    path = Path(folder, "sharded", "epoch=1.ckpt")
    parts = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    whole = Path(folder, "whole.ckpt").stat().st_size
    assert sum(parts) < 1.6 * whole
    assert min(parts) > 0.3 * sum(parts)
    for result in two_rank_results:
        assert result["consolidated into ddp"] == pytest.approx(result["losses"][4:], rel=1e-4)


def test_resume_across_two_four_and_one_ranks_matches_plain_losses(
    two_rank_results: list[dict[str, Any]], plain_run: Plain, folder: str
) -> None:
    four = run_ranks(resume_and_save_both_formats, 4, folder, 0)
    one = run_ranks(resume_and_save_both_formats, 1, folder, 1)
    for kind in ("full", "sharded"):
        assert [result[f"{kind} open"] for result in (*four, *one)] == [[]] * 5
        losses = mean(four, kind) + mean(one, kind)
        assert losses == pytest.approx(plain_run[0][2:], rel=1e-5 if kind == "full" else 1e-4)


def test_load_of_invalid_checkpoint_raises_on_all_ranks_and_changes_nothing(
    two_rank_results: list[dict[str, Any]], folder: str
) -> None:
    results = run_ranks(try_invalid_checkpoints, 2, folder)
    for result in results:
        for name, error, words in (
            ("cut", CheckpointError, "cut.ckpt is damaged or cut short"),
            ("foreign", CheckpointError, "it holds the keys ['weights'], no state_dict"),
            ("text", CheckpointError, "text.ckpt is damaged or not a checkpoint"),
            ("missing", CheckpointError, "none.ckpt can't be read"),
            ("empty folder", CheckpointError, "there is no .metadata in it"),
            ("damaged folder", CheckpointError, "distcp is damaged"),
            ("pipe", CheckpointError, "pipe.ckpt can't be read: it is not an ordinary file"),
            ("circle of links", CheckpointError, "circle can't be read: [Errno 40] Too many levels"),
            ("write to a pipe", CheckpointError, "no checkpoint is written to"),
            ("write to a circle", CheckpointError, "circle/a.ckpt can't be written: "),
            ("two optimizers", ConfigurationError, "the state of 2 optimizers, the module has 1"),
            ("another shape", ShardingError, "exp_avg of"),
            ("only weights", ConfigurationError, "save_weights_only"),
            ("unwritable", CheckpointError, "can't be written"),
            ("ordinary folder", CheckpointError, "it is a folder that holds thesis.txt, and only checkpoints are"),
        ):
            assert result[name][0] == error.__name__, (name, result[name])
            assert words in result[name][1]
        for victim, what in itertools.product(range(2), ("", " for moments")):
            assert "can't allocate memory" in result[f"no memory on rank {victim}{what}"]
        assert result["seconds"] < 10
        assert result["removal"][1] == "years of work"
        assert result["unchanged"]
        assert result["hooked"] > 0
    assert "data is not removed: it is a folder that holds thesis.txt" in "".join(results[0]["removal"][0])
    ordered, other = results[0]["by name"]
    assert ordered.keys() == other.keys() != set()
    assert all(torch.equal(other[name], moment) for name, moment in ordered.items())


def test_strategy_with_unknown_save_format_raises_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="'full' or 'sharded'"):
        OSDPStrategy(save_format="half")


def test_consolidate_of_non_checkpoint_reports_error_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["consolidate", str(tmp_path), str(tmp_path / "a.ckpt")]) == 2
    assert "is not a checkpoint of lightning_osdp" in capsys.readouterr().err
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == "[]"
