"""Training as rank 0 of a cluster that is not there: real plans, real engine, as many ranks as users have."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_osdp
from lightning_osdp.cli import emulate, emulate_worker
from lightning_osdp.cli.main import main
from lightning_osdp.emulation import EmulatedCluster
from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.spec.choices import ShardingScope
from lightning_osdp.strategy.callback import OSDPCallback
from lightning_osdp.strategy.osdp import OSDPStrategy
from tests.support.plans import plan_for

# Lightning 2.6 calls what jsonargparse 4.53 is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

WIDTH, BATCH_SIZE, STEPS = 64, 4, 3
WEIGHT_BYTES = 4 * 4 * WIDTH * WIDTH
CONFIG = Path(__file__).parents[2] / "examples" / "cli" / "fit.yaml"


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class FullyShardedNet(Net):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class BytesByStep(pl.Callback):
    """What the group has sent after each step."""

    def __init__(self) -> None:
        self.sent: list[dict[str, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.sent.append(dict(dist.group.WORLD.bytes_sent))  # type: ignore[union-attr]

    def last_step(self, name: str) -> int:
        return self.sent[-1][name] - self.sent[-2][name]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(1 << 13, WIDTH)), batch_size=BATCH_SIZE)


@contextmanager
def emulated(hardware: str, devices: int, nodes: int | None = None) -> Iterator[EmulatedCluster]:
    try:
        yield EmulatedCluster(resolve_cluster(hardware, devices, nodes))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def fit(strategy: Any, environment: EmulatedCluster, module: Net | None = None, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    defaults = {"accelerator": "cpu", "devices": 1, "max_steps": STEPS, "enable_model_summary": False}
    trainer = pl.Trainer(**quiet | defaults | options, strategy=strategy, plugins=[environment])
    trainer.fit(module or Net(), loader())
    return trainer


@pytest.mark.parametrize(
    ("hardware", "ranks", "nodes"),
    [("a100-80gb-nvlink", 7, 1), ("8xa100-80gb-nvlink+200gbit", 64, 8), ("64xh100-80gb-nvlink+200gbit", 512, 64)],
)
@pytest.mark.parametrize(("mode", "gathers"), [("zdp", 2), ("zdp2", 1)])
def test_sharded_plan_of_many_ranks_trains_and_sends_what_its_mode_says(
    hardware: str, ranks: int, nodes: int, mode: str, gathers: int
) -> None:
    batch = next(iter(loader()))
    plan = plan_for(Net(), batch, ranks, mode, BATCH_SIZE)
    with emulated(hardware, ranks) as environment:
        assert (environment.cluster.nodes, environment.cluster.ranks) == (nodes, ranks)
        strategy, sent = OSDPStrategy(plan=plan), BytesByStep()
        fit(strategy, environment, callbacks=[sent])
        assert strategy.world_size == ranks
    padding = 4 * 4 * ranks + 64  # each weight is padded to equal shards; biases are replicated; the logged loss
    gathered, reduced = sent.last_step("all_gather"), sent.last_step("reduce_scatter")
    assert gathers * WEIGHT_BYTES <= gathered <= gathers * (WEIGHT_BYTES + padding)
    assert WEIGHT_BYTES <= reduced <= WEIGHT_BYTES + padding


def test_search_for_two_nodes_of_eight_shards_inside_nodes() -> None:
    with emulated("2xa100-80gb-nvlink+10gbit", 16) as environment:
        strategy = OSDPStrategy(batch_size=BATCH_SIZE, sharding_group="node", trial_steps=False, cache="")
        fit(strategy, environment, callbacks=[OSDPCallback(modes="zdp")])
        plan = strategy.execution_plan
        assert plan is not None
        assert (plan.cluster.nodes, plan.cluster.devices_per_node) == (2, 8)
        assert {op.sharding_group for op in plan.operators if "zdp" in op.slices} == {ShardingScope.NODE}


def test_plan_for_other_number_of_ranks_is_refused() -> None:
    plan = plan_for(Net(), next(iter(loader())), 8, "zdp", BATCH_SIZE)
    with emulated("2xa100-80gb-nvlink+200gbit", 16) as environment, pytest.raises(PlanMismatchError, match="16"):
        fit(OSDPStrategy(plan=plan), environment)


@pytest.mark.parametrize(
    ("strategy", "module"),
    [
        (DDPStrategy, Net),
        (lambda: ModelParallelStrategy(data_parallel_size=16, tensor_parallel_size=1), FullyShardedNet),
    ],
    ids=["ddp", "fully_shard"],
)
def test_other_strategies_train_in_an_emulated_cluster(strategy: Callable[[], Any], module: Callable[[], Net]) -> None:
    with emulated("2xa100-80gb-nvlink+200gbit", 16) as environment:
        trainer = fit(strategy(), environment, module())
        assert trainer.global_step == STEPS
        assert dist.group.WORLD.calls > STEPS  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("name", ["osdp", "ddp"])
def test_nothing_is_saved_linked_or_removed(name: str, tmp_path: Path) -> None:
    earlier = tmp_path / "last.ckpt"
    earlier.write_text("of a real run")
    plan = plan_for(Net(), next(iter(loader())), 16, "zdp", BATCH_SIZE)
    saving = ModelCheckpoint(tmp_path, "{step}", save_last="link", every_n_train_steps=1)
    with emulated("2xa100-80gb-nvlink+200gbit", 16) as environment:
        strategy = OSDPStrategy(plan=plan) if name == "osdp" else DDPStrategy()
        options = {"default_root_dir": tmp_path, "enable_checkpointing": True, "callbacks": [saving]}
        trainer = fit(strategy, environment, **options)
        trainer.save_checkpoint(tmp_path / "mine.ckpt")
    assert [file.name for file in tmp_path.rglob("*.ckpt")] == ["last.ckpt"]
    assert earlier.read_text() == "of a real run"


def test_real_training_in_the_same_process_saves_again(tmp_path: Path) -> None:
    with emulated("a100-80gb-nvlink", 8) as environment:
        fit(DDPStrategy(), environment)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, default_root_dir=tmp_path, **options)
    trainer.fit(Net(), loader())
    assert list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("hardware", "ranks", "nodes"),
    [
        ("a100-80gb-nvlink", 7, 1),
        ("3xa100-80gb-nvlink+200gbit", 15, 3),
        ("8xa100-80gb-nvlink+200gbit", 64, 8),
        ("64xh100-80gb-nvlink+200gbit", 512, 64),
    ],
)
def test_search_for_any_number_of_ranks_predicts_and_trains_their_shards(hardware: str, ranks: int, nodes: int) -> None:
    with emulated(hardware, ranks) as environment:
        strategy = OSDPStrategy(batch_size=BATCH_SIZE, sharding_group="world", trial_steps=False, cache="")
        trainer = fit(strategy, environment, callbacks=[OSDPCallback(modes="zdp")])
        plan = strategy.execution_plan
        assert plan is not None
        assert (plan.cluster.ranks, plan.cluster.nodes) == (ranks, nodes)
        assert {mode for operator in plan.operators for mode in operator.slices} == {"zdp"}
        assert {operator.sharding_group for operator in plan.operators} == {ShardingScope.WORLD}
        shards, biases = 4 * -(-WIDTH * WIDTH // ranks) * 4, 4 * WIDTH * 4
        objects = 4 * plan.cluster.unit_bytes + 2 * 8 * plan.cluster.tensor_bytes  # AdamW has two states
        assert plan.peak is not None
        assert plan.peak.states == pytest.approx(3 * (shards + biases) + objects, rel=0.02)
        assert trainer.global_step == STEPS


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("auto", "^SingleDeviceStrategy trains one device without the others, but this process stands for 16 ranks"),
        ("ddp_spawn", "^DDPStrategy starts processes, which are not in the emulated cluster, but"),
        ("ddp_fork", "^DDPStrategy starts processes, which are not in the emulated cluster, but"),
    ],
)
def test_strategy_that_would_not_train_as_rank_of_the_cluster_is_refused(strategy: str, words: str) -> None:
    with emulated("2xa100-80gb-nvlink+200gbit", 16) as environment, pytest.raises(ConfigurationError, match=words):
        fit(strategy, environment)


def test_plan_without_training_is_made_in_the_process_of_an_emulated_cluster() -> None:
    with emulated("a100-80gb-nvlink", 8):
        assert lightning_osdp.plan(Net(), loader(), hardware="a100-80gb-nvlink", devices=4).cluster.ranks == 4


class CallsBack(Net):
    """Has a collective of its own in its step."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.call()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", ["osdp", "ddp"])
def test_users_collective_that_is_not_emulated_ends_training_with_its_name(name: str) -> None:
    def call() -> None:
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(0.5))

    plan = plan_for(Net(), next(iter(loader())), 16, "zdp", BATCH_SIZE)
    with emulated("2xa100-80gb-nvlink+200gbit", 16) as environment:
        strategy = OSDPStrategy(plan=plan) if name == "osdp" else DDPStrategy()
        with pytest.raises(ConfigurationError, match=r"reduction .*PREMUL_SUM is not emulated"):
            fit(strategy, environment, CallsBack(call))


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command prints as JSON for two of the strategies, trained one after the other; and their errors."""
    folder = tmp_path_factory.mktemp("emulate")
    found: dict[str, Any] = {}
    own, errors = os.dup(2), os.open(folder / "errors", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    for strategy in ("ddp", "fsdp"):
        args = ["emulate", "--config", str(CONFIG), "--hardware", "a100-80gb-nvlink", "--devices", "8"]
        args += ["--steps", "3", "--batch-size", "8", "--strategy", strategy, "--json"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            printed = _captured(lambda args=args: main(args))  # type: ignore[misc]
        (found[strategy],) = json.loads(printed)
    os.dup2(own, 2)
    found["errors"] = (folder / "errors").read_text()
    return found


def test_processes_of_the_command_leave_it_to_the_command_to_say_what_it_does(command: dict[str, Any]) -> None:
    assert "Emulating" not in command["errors"]


def _captured(call: Callable[[], int]) -> str:
    with redirect_stdout(io.StringIO()) as output:
        assert call() == 0
    return output.getvalue()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_command_measures_step_and_memory_of_a_strategy(command: dict[str, Any], strategy: str) -> None:
    facts = command[strategy]
    assert facts["strategy"] == strategy
    assert facts["batch_size"] == 8
    assert facts["samples_per_s"] == pytest.approx(8 * 8 / facts["step_time_s"])
    assert facts["peak_memory_bytes"] > facts["before_bytes"]


def test_command_shows_that_fsdp_shards(command: dict[str, Any]) -> None:
    """4.3 M parameters: DDP holds weights, gradients and two optimizer states, FSDP an eighth of them."""
    own = {
        name: facts["peak_memory_bytes"] - facts["before_bytes"] for name, facts in command.items() if name != "errors"
    }
    assert own["ddp"] - own["fsdp"] > 4.3e6 * 4 * 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--hardware", "a100-80gb-nvlink", "--devices", "64"], "has 1 to 8 devices, not 64"),
        (["--hardware", "a100-80gb-nvlink", "--devices", "8", "--steps", "0"], "steps"),
        (["--hardware", "nothing.json"], "there is no hardware file nothing.json"),
    ],
)
def test_command_with_bad_input_says_what_is_wrong(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emulate", "--config", str(CONFIG), *args]) == 2
    assert words in capsys.readouterr().err


def test_command_plans_a_module_that_is_too_large_to_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """17 MB of weights where 20 MB are free."""
    monkeypatch.setattr(emulate, "memory_limit", lambda *_, **__: 20_000_000)
    args = ["--hardware", "8xa100-80gb-nvlink+200gbit", "--devices", "64", "--batch-size", "4", "--cache", ""]
    assert main(["emulate", "--config", str(CONFIG), *args, "--memory-limit", "8GiB", "--plan-only", "--json"]) == 0
    output = capsys.readouterr()
    plan = json.loads(output.out)
    assert plan["cluster"]["nodes"] * plan["cluster"]["devices_per_node"] == 64
    assert "Its steps can't be emulated here: a rank takes" in output.err


@pytest.mark.parametrize(("free_bytes", "limit_bytes"), [(64 << 30, 1 << 30), (2 << 30, 512 << 20)])
def test_module_above_a_gibibyte_or_a_quarter_of_memory_is_planned_from_its_shapes(
    free_bytes: int, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def stop(config: Any, *_: Any, **__: Any) -> None:
        found.append(config.make_module.limit_bytes)
        raise ConfigurationError("seen")

    monkeypatch.setattr(emulate, "memory_limit", lambda *_, **__: free_bytes)
    monkeypatch.setattr(emulate.offline_plan, "plan_from_config", stop)
    args = ["--config", str(CONFIG), "--hardware", "a100-80gb-nvlink", "--devices", "8", "--plan-only"]
    assert main(["emulate", *args]) == 2
    assert found == [limit_bytes]


OWN_MODULE = """
import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        self.logger.experiment.add_scalar("index", index)
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class ReadOnce(IterableDataset):
    left = 10

    def __iter__(self):
        while self.left:
            self.left -= 1
            yield [torch.randn(8)]


class Data(L.LightningDataModule):
    def __init__(self, kind: str = ""):
        super().__init__()
        self.kind = kind
        self.once = ReadOnce()

    def train_dataloader(self):
        samples = TensorDataset(torch.randn(64 if self.kind != "small" else 4, 8))
        return DataLoader(self.once if self.kind == "once" else samples, batch_size=2, drop_last=True)
"""

CALLBACKS = {
    "EarlyStopping": {"monitor": "train_loss", "mode": "max", "patience": 1},
    "ModelCheckpoint": {"monitor": "val_loss"},
    "LearningRateMonitor": {},
    "TQDMProgressBar": {},
}
STOPS_ON_VALIDATION = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}}


def train_own_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, steps: int
) -> emulate_worker.StrategyResult:
    """Train a file of a user under DDP on eight ranks, as the command's process does."""
    (folder / f"own_{kind}.py").write_text(OWN_MODULE)
    callbacks = [
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": args} for name, args in CALLBACKS.items()
    ]
    config = {
        "model": {"class_path": f"own_{kind}.Net"},
        "data": {"class_path": f"own_{kind}.Data", "init_args": {"kind": kind}},
        "trainer": {"accelerator": "cpu", "callbacks": [*callbacks, STOPS_ON_VALIDATION], "min_steps": 10**6},
    }
    (folder / "fit.yaml").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    task = emulate_worker.Task(
        config="fit.yaml",
        cluster=resolve_cluster("a100-80gb-nvlink", 8),
        strategy="ddp",
        num_steps=steps,
        result="",
        parent=0,
    )
    try:
        return emulate_worker.train(task)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning")
def test_callbacks_neither_end_the_timed_steps_nor_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps an epoch: there are epochs without a metric of validation, which EarlyStopping and others ask for."""
    result = train_own_module(tmp_path, monkeypatch, "plain", 6)
    assert (result.batch_size, result.failure) == (2, "")
    assert result.step_time_s > 0
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning")
@pytest.mark.parametrize(("kind", "made"), [("small", 0), ("once", 5)])
def test_data_for_too_few_steps_are_an_error(
    kind: str, made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=f"has batches for {made} optimizer steps of a rank, 9 are needed"):
        train_own_module(tmp_path, monkeypatch, kind, 6)
