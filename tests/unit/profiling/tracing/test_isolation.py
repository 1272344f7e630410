"""Whatever a step does to the user's objects, files and random states, planning leaves no trace of it."""

from __future__ import annotations

import atexit
import collections
import functools
import inspect
import io
import itertools
import logging
import random
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.trial_step import TrialContext, time_step
from lightning_osdp.errors import OSDPWarning, TraceError
from lightning_osdp.profiling.tracing.deep_copy import deep_copy
from lightning_osdp.profiling.tracing.isolation import restored
from tests.support.traced_models import Regression, trace, trace_by_running

CPU = torch.device("cpu")
BATCH = torch.arange(32.0).view(4, 8) / 32

GLOBAL_LIST: list[Any] = []
GLOBAL_COUNT = 0
GLOBAL_RANDOM = random.Random(3)
GLOBAL_METER = torchmetrics.MeanMetric()
GLOBAL_NUMBERS = itertools.count()
GLOBAL_GENERATOR = (number for number in range(3))
GLOBAL_FILE = tempfile.TemporaryFile("w+")  # noqa: SIM115
atexit.register(GLOBAL_FILE.close)


class Meter:
    """A user's own class, with attributes in slots and of the class."""

    __slots__ = ("total",)
    made: ClassVar[list[int]] = []
    count = 0

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, value: float) -> None:
        self.total += value
        Meter.count += 1
        self.made.append(1)


METER = Meter()


@functools.cache
def cached_ones(rows: int) -> Tensor:
    return torch.ones(rows, 1)


class Busy(Regression):
    """Its step does one thing after another to what it can reach."""

    history: ClassVar[list[int]] = []
    numbers_of_class: ClassVar[Iterator[int]] = itertools.count()

    @functools.lru_cache  # noqa: B019
    def cached(self, rows: int) -> Tensor:
        return torch.ones(rows, 1)

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def cached_by_class(rows: int) -> Tensor:
        return torch.ones(rows, 1)

    @functools.cached_property
    def table(self) -> Tensor:
        return torch.ones(3)

    def __init__(self, act: Callable[[Busy, Tensor], Any]) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        self.act = act
        self.outputs: list[Any] = []
        self.by_name: dict[str, Any] = collections.defaultdict(list)
        self.recent: collections.deque[Any] = collections.deque(maxlen=3)
        self.seen: set[int] = set()
        self.accuracy = torchmetrics.MeanMetric()
        self.in_list, self.in_dict = [torchmetrics.MeanMetric()], {"a": torchmetrics.SumMetric()}
        self.counter = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("steps", torch.zeros(1))
        self.numbers = itertools.count()
        self.random = random.Random(1)
        self.numpy_random = np.random.default_rng(1)
        self.generator = torch.Generator().manual_seed(1)
        self.array = np.zeros(2)
        self.meter = Meter()
        self.lock = threading.Lock()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.act(self, loss)
        return loss


def rebind_global(_: Busy, __: Tensor) -> None:
    global GLOBAL_COUNT
    GLOBAL_COUNT += 1


def count_in_function(_: Busy, __: Tensor, calls: list[int] = []) -> None:  # noqa: B006
    calls.append(1)
    count_in_function.calls = getattr(count_in_function, "calls", 0) + 1  # type: ignore[attr-defined]


def many(module: Busy, loss: Tensor) -> None:
    module.outputs.append(loss.detach())
    module.by_name["loss"].append(loss)
    module.recent.append(loss)
    module.seen.add(len(module.seen))
    module.history.append(1)
    module.counter.add_(1)
    module.steps += 1
    module.accuracy(loss.detach())
    module.in_list[0].update(loss.detach())
    module.in_dict["a"](loss.detach())
    next(module.numbers)
    module.random.random()
    module.numpy_random.random()
    torch.rand(1, generator=module.generator)
    module.array += 1
    with module.lock:
        module.meter.add(1.0)


def fill_caches(module: Busy, loss: Tensor) -> Any:
    return loss + cached_ones(1) + module.cached(1) + module.cached_by_class(1) + module.table


CACHES: Any = (cached_ones, Busy.cached, Busy.cached_by_class)
ACTS: dict[str, Callable[[Busy, Tensor], Any]] = {
    "many": many,
    "caches": fill_caches,
    "global numbers": lambda *_: (next(GLOBAL_NUMBERS), next(Busy.numbers_of_class)),
    "global file": lambda *_: GLOBAL_FILE.write("line"),
    "global list": lambda _, loss: GLOBAL_LIST.append(loss),
    "global count": rebind_global,
    "global random": lambda *_: GLOBAL_RANDOM.random(),
    "global metric": lambda _, loss: GLOBAL_METER.update(loss.detach().new_ones(())),
    "global object": lambda *_: METER.add(2.0),
    "function": count_in_function,
    "random states": lambda *_: (random.random(), np.random.rand(), torch.rand(1)),
    "item": lambda module, loss: module.outputs.append(loss.item()),
    "decision": lambda module, loss: module.outputs.append(1) if loss.item() > -1 else None,
    "float": lambda module, loss: module.outputs.append(float(loss.detach())),
    "numpy": lambda module, loss: module.outputs.append(loss.detach().numpy()),
}


def state_of(module: Busy) -> Any:
    """All that an act may change, as text."""
    own = {name: str(getattr(module, name)) for name in ("outputs", "recent", "seen", "array", "numbers")}
    metrics = [module.accuracy, *module.in_list, *module.in_dict.values(), GLOBAL_METER]
    return (
        own,
        dict(module.by_name),
        [(metric._update_count, str(metric.metric_state)) for metric in metrics],
        (module.counter.item(), module.steps.item(), module.meter.total, METER.total, Meter.count, len(Meter.made)),
        (module.random.getstate(), str(module.numpy_random.bit_generator.state), module.generator.get_state().tolist()),
        (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), GLOBAL_RANDOM.getstate()),
        ([cache.cache_info().currsize for cache in CACHES], GLOBAL_FILE.tell(), "table" in vars(module)),
        (str(GLOBAL_NUMBERS), str(Busy.numbers_of_class)),
        (len(GLOBAL_LIST), GLOBAL_COUNT, Busy.history, vars(count_in_function), count_in_function.__defaults__),
        {name: value.tolist() for name, value in module.state_dict().items()},
        [parameter.grad for parameter in module.parameters()],
    )


def run_trial(module: LightningModule, batch: Any = BATCH, batch_size: int = 4, **_: Any) -> None:
    time_step(TrialContext(module, batch, batch_size, CPU), [2], RankGroup.single(CPU), None)


HOWS = {"fake": trace, "real": trace_by_running, "trial": run_trial}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("how", HOWS)
def test_planning_leaves_every_object_of_the_user_as_it_was(how: str, act: str) -> None:
    module = Busy(ACTS[act])
    before = state_of(module)
    if how == "fake" and act in ("decision", "float", "numpy", "global metric"):
        with pytest.raises(TraceError, match="can't be traced"):
            trace(module, BATCH, 4, device=CPU)
    else:
        HOWS[how](module, BATCH, 4, device=CPU)
    assert state_of(module) == before


def write_files(folder: Path, module: Busy, loss: Tensor) -> None:
    with open(folder / "log.txt", "a") as file:
        file.write("step\n")
    (folder / "path.txt").write_text("step")
    np.save(folder / "array.npy", np.zeros(2))
    torch.save(module.state_dict(), folder / "weights.pt")
    (folder / "made").mkdir(exist_ok=True)
    (folder / "old.txt").unlink()
    print("printed")
    logging.getLogger("of the user").error("logged")


@pytest.mark.parametrize("how", HOWS)
def test_planning_writes_no_file_and_prints_nothing(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old.txt").write_text("old")
    module = Busy(lambda own, loss: write_files(tmp_path, own, loss))
    HOWS[how](module, BATCH, 4, device=CPU)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.txt", "old")]
    assert "printed" not in capfd.readouterr().out
    assert not caplog.records
    print("again")
    assert capfd.readouterr().out == "again\n"


@pytest.mark.parametrize("how", HOWS)
def test_hooks_that_close_over_the_module_use_the_copy(how: str) -> None:
    """The step reads what its hook has collected: on a copy, in a list of the copy."""
    outside: list[Any] = []

    class Collecting(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
            self.features: list[Tensor] = []
            self.net[0].register_forward_hook(lambda _, __, output: self.features.append(output))
            self.net[1].register_forward_hook(lambda _, __, output: outside.append(output.detach()))
            self.net[0].register_forward_hook(self.keep)

        def keep(self, _: Any, __: Any, output: Tensor) -> None:
            self.features.append(output)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            features, self.features = self.features, []
            assert len(features) == 2
            return loss + sum(each.square().mean() for each in features)  # type: ignore[no-any-return]

    module = Collecting()
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    HOWS[how](module, BATCH, 4, device=CPU)
    assert module.features == outside == []
    module.training_step(BATCH, 0)
    assert len(outside) == 1


@pytest.mark.parametrize("how", HOWS)
def test_callbacks_and_metrics_of_the_trainer_stay_as_they_were(how: str, tmp_path: Path) -> None:
    class Noted(Callback):
        def __init__(self) -> None:
            self.losses: list[Any] = []

    def act(module: Busy, loss: Tensor) -> None:
        trainer: Any = module.trainer
        trainer.callbacks[0].losses.append(loss)
        trainer.callback_metrics["own"] = loss
        trainer.should_stop = True
        trainer.save_checkpoint(tmp_path / "step.ckpt")
        module.logger.experiment.add_scalar("loss", 1.0)  # type: ignore[union-attr]
        module.logger.log_metrics({"loss": 1.0})  # type: ignore[union-attr]

    noted = Noted()
    logger = CSVLogger(tmp_path)
    trainer = Trainer(callbacks=[noted], logger=logger, accelerator="cpu", devices=1, enable_progress_bar=False)
    module = Busy(act)
    module.trainer = trainer
    HOWS[how](module, BATCH, 4, device=CPU)
    assert noted.losses == []
    assert trainer.callback_metrics == {}
    assert not trainer.should_stop
    assert logger._experiment is None
    assert list(tmp_path.iterdir()) == []


# -- what can't be copied ----------------------------------------------------------------------------------------------


class Writer:
    """Like a SummaryWriter: a thread empties a queue."""

    def __init__(self) -> None:
        self.thread = threading.Thread(target=print, daemon=True)
        self.written: list[Any] = []

    def add_scalar(self, name: str, value: Any) -> None:
        self.written.append((name, value))


def read_lines(file: Any) -> str:
    return str(file.readline())


HELD: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "lock": (lambda _: threading.RLock(), lambda lock: lock.acquire() and lock.release(), lambda lock: lock.acquire()),
    "unused generator": (lambda _: (i for i in range(3)), id, list),
    "file written": (lambda path: path.open("w"), lambda file: file.write("step"), lambda file: file.tell()),
    "file read": (lambda path: path.open(), read_lines, read_lines),
    "thread": (lambda _: Writer(), lambda writer: writer.add_scalar("a", 1), lambda writer: writer.written),
    "database": (lambda _: sqlite3.connect(":memory:"), lambda base: base.commit(), lambda base: base.total_changes),
    "in a list": (lambda _: [threading.Lock(), {"a": (i for i in range(2))}], len, lambda held: list(held[1]["a"])),
}  # fmt: skip


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("how", HOWS)
def test_modules_that_hold_what_cannot_be_copied_are_planned_for(how: str, held: str, tmp_path: Path) -> None:
    make, use, look = HELD[held]
    (tmp_path / "file").write_text("first\nsecond\n")
    module = Busy(lambda own, _: use(own.held))
    module.held = make(tmp_path / "file")
    HOWS[how](module, BATCH, 4, device=CPU)
    (tmp_path / "file").write_text("first\nsecond\n")
    fresh = make(tmp_path / "file")
    assert type(module.held) is type(fresh)
    assert look(module.held) == look(fresh)
    for each in (module.held, fresh):
        if isinstance(each, io.IOBase):
            each.close()


@pytest.mark.parametrize("how", ["fake", "real"])
@pytest.mark.parametrize("act", [lambda own, _: next(own.held), lambda *_: next(GLOBAL_GENERATOR)])
def test_step_that_draws_from_a_generator_of_the_module_is_refused_by_name(act: Any, how: str) -> None:
    module = Busy(act)
    module.held = (i for i in range(3))
    with pytest.raises(TraceError, match="draws from a generator that the module or a variable holds"):
        HOWS[how](module, BATCH, 4, device=CPU)
    assert list(module.held) == [0, 1, 2]
    assert inspect.getgeneratorstate(GLOBAL_GENERATOR) == inspect.GEN_CREATED


def test_deep_copy_module_that_refuses_raises_its_own_error() -> None:
    class Refusing(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        deep_copy(nn.Sequential(Refusing(2, 2)), {})


def test_deep_copy_results_of_autograd_are_copied_without_history() -> None:
    module = Regression(nn.Linear(8, 8))
    module.last = module.net(BATCH)
    copied = deep_copy(module, {})
    assert torch.equal(copied.last, module.last)
    assert copied.last is not module.last
    assert module.last.grad_fn is not None


# -- metrics and numbers -----------------------------------------------------------------------------------------------


class Classifier(LightningModule):
    """Logs accuracy in the ways that people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.net = how, nn.Linear(8, 3)
        make: Callable[[], Any] = lambda: torchmetrics.Accuracy(task="multiclass", num_classes=3)  # noqa: E731
        self.accuracy = make()
        self.metrics = torchmetrics.MetricCollection(
            {"acc": make(), "f1": torchmetrics.F1Score("multiclass", num_classes=3)}
        )
        self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=3)
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)
        self.listed, self.correct, self.total = nn.ModuleList([make()]), 0, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits, labels = self.net(batch), batch[:, 0].long() % 3
        loss = nn.functional.cross_entropy(logits, labels)
        if self.how == "forward":
            self.log("acc", self.accuracy(logits, labels))
        elif self.how == "update":
            self.accuracy.update(logits.softmax(-1), labels)
            self.log("acc", self.accuracy, on_epoch=True)
        elif self.how == "compute":
            self.accuracy.update(logits, labels)
            self.log("acc", self.accuracy.compute().item())
        elif self.how == "collection":
            self.log_dict(self.metrics(logits, labels))
            self.metrics.update(logits, labels)
            self.log_dict(self.metrics.compute())
        elif self.how == "curves":
            self.confusion.update(logits, labels)
            self.log("auroc", self.auroc(logits, labels))
        elif self.how == "list":
            self.listed[0](logits, labels)
            self.accuracy.reset()
        elif self.how == "item":
            correct = (logits.argmax(-1) == labels).sum()
            self.correct += correct.item()
            self.total += len(labels)
            self.log("acc", self.correct / self.total)
            self.log("rate", round(correct.item() / len(labels), 3) * 100)
            self.log("text", float(f"{loss.item():.3f}"))
        elif self.how == "scaled":
            loss = loss / loss.detach().item() * (labels >= 0).sum().item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


WAYS = ["forward", "update", "compute", "collection", "curves", "list", "item", "scaled"]


@pytest.mark.filterwarnings("ignore:No (posi|nega)tive samples:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_trace_metrics_and_items_need_no_real_step(way: str) -> None:
    plain, profile = (trace(Classifier(how), BATCH, 4, device=CPU).model_profile for how in ("none", way))
    assert profile.operators == plain.operators
    module = Classifier(way)
    trace(module, BATCH, 4, device=CPU)
    assert (module.correct, module.total, module.accuracy._update_count) == (0, 0, 0)
    module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    module.training_step(BATCH, 0)  # what was replaced while tracing is in its place again
    if way == "forward":
        assert isinstance(module.accuracy.compute().item(), float)


DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "if": lambda x: 1 if x.sum().item() > 0 else 2,
    "int": lambda x: int(x.sum().item()),
    "size": lambda x: torch.zeros(x.long().max().item()),
    "range": lambda x: list(range(x.long().max().item())),
    "slice": lambda x: x[: x.long().max().item()],
    "while": lambda x: next(i for i in itertools.count() if i >= x.long().max().item()),
    "max": lambda x: max(0.0, x.sum().item()),
    "truth": lambda x: not x.sum().item(),
}


@pytest.mark.parametrize("use", DEPENDENT)
def test_trace_step_that_depends_on_an_item_is_refused_not_guessed(use: str) -> None:
    class Dependent(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            DEPENDENT[use](batch)
            return super().training_step(batch, batch_idx)

    with pytest.raises(TraceError, match="the training step of Dependent can't be traced"):
        trace(Dependent(nn.Linear(8, 8)), BATCH, 4, device=CPU)
    assert trace_by_running(Dependent(nn.Linear(8, 8)), BATCH, 4, device=CPU).model_profile.num_parameters == 72


def test_restored_nested_user_objects_keep_identity_and_values() -> None:
    class Box:
        def __init__(self) -> None:
            self.items = {"a": [1, {2}], "b": np.arange(3)}
            self.tensor = torch.ones(2)

    box = Box()
    inner, items = box.items["a"], box.items
    with restored(box):
        inner.append(3)
        inner[1].add(4)
        box.items["b"][:] = 7
        box.items = {}
        box.tensor.mul_(2)
        box.new = 1  # type: ignore[attr-defined]
    assert box.items is items
    assert box.items["a"] is inner
    assert inner == [1, {2}]
    assert box.items["b"].tolist() == [0, 1, 2]
    assert box.tensor.tolist() == [1, 1]
    assert not hasattr(box, "new")


def test_restored_block_that_raises_is_undone_too() -> None:
    held: list[int] = []

    def fails() -> Iterator[None]:
        with restored(held):
            held.append(1)
            raise ValueError("within")
        yield

    with pytest.raises(ValueError, match="within"):
        next(fails())
    assert held == []
    assert io.open is open


def test_write_into_a_tensor_too_large_to_restore_is_said() -> None:
    table, other = torch.zeros(1 << 19), torch.zeros(1 << 19)
    pattern = r"writes into a tensor of shape \(524288,\) outside"
    with pytest.warns(OSDPWarning, match=pattern) as caught, restored([table, other]):
        table[0] = 1.0
    assert len(caught) == 1
