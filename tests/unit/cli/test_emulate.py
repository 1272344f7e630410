"""What ``osdp emulate`` asks of its processes, and what it makes of their results; no process is started."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_osdp.cli import emulate, emulate_worker, offline_plan
from lightning_osdp.cli.emulate_worker import StrategyName, StrategyResult
from lightning_osdp.cli.main import main
from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.spec.search_record import Baseline
from lightning_osdp.planning.whatif import hardware
from tests.support.models import hand_made_plan

GIB = 1 << 30


def request(*strategies: StrategyName, batch_size: int | None = None) -> emulate.Request:
    return emulate.Request(Path("fit.yaml"), resolve_cluster("h100-80gb-nvlink", 8), strategies, 5, batch_size, {})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The strategies and batch sizes that are trained, in their order; DDP does not fit, FSDP fits at 12."""
    found: list[tuple[str, int | None]] = []
    ddp = Baseline(name="DDP", fits=False, batch_size=1, peak_memory_bytes=3 * GIB, missing_bytes=2 * GIB)
    fsdp = Baseline(name="FSDP per block", fits=True, batch_size=12, samples_per_s=5.0, peak_memory_bytes=GIB)
    plan = hand_made_plan({}, 8, batch_size=20).model_copy(update={"baselines": (ddp, fsdp)})

    def train(_: Any, strategy: StrategyName, batch_size: int | None, quiet: bool) -> StrategyResult:
        found.append((strategy, batch_size))
        return StrategyResult(
            strategy=strategy, batch_size=batch_size or 20, step_time_s=0.5, plan=plan if strategy == "osdp" else None
        )

    monkeypatch.setattr(emulate, "_train", train)
    return found


def test_each_strategy_gets_its_own_best_batch_size(trained: list[tuple[str, int | None]]) -> None:
    results = emulate._train_all(request(*emulate.STRATEGIES), quiet=True)
    assert trained == [("osdp", None), ("fsdp", 12), ("fsdp2", 12)]
    assert results[1].failure == "does not fit: 2.00 GiB are missing"
    assert results[2].samples_per_s(8) == 8 * 12 / 0.5


def test_given_batch_size_holds_for_all_that_fit(trained: list[tuple[str, int | None]]) -> None:
    emulate._train_all(request("osdp", "fsdp", batch_size=4), quiet=True)
    assert trained == [("osdp", 4), ("fsdp", 4)]


def test_single_strategy_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = StrategyResult(strategy="osdp", failure="nothing fits", needed_bytes=3 * GIB, budget_bytes=GIB)
    monkeypatch.setattr(emulate, "_train", lambda *_: failed)
    with pytest.raises(InfeasibleError, match="nothing fits") as caught:
        emulate._train_all(request("osdp"), quiet=True)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (3 * GIB, GIB)


def test_cluster_file_stands_for_its_own_links(tmp_path: Path) -> None:
    cluster = resolve_cluster("h100-80gb-nvlink", 4)
    file = tmp_path / "cluster.json"
    file.write_text(cluster.model_dump_json())
    assert resolve_cluster(str(file), 4, None) == cluster


@pytest.mark.parametrize("nodes", [1, 2])
def test_command_says_once_what_it_does(
    trained: list[tuple[str, int | None]], nodes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fit.yaml"
    config.write_text("model: {class_path: tests.support.modules.GPTModule}")
    name = "h100-80gb-nvlink" if nodes == 1 else "2xh100-80gb-nvlink+200gbit"
    assert main(["emulate", "--config", str(config), "--hardware", name, "--compare"]) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    words = f"Emulating {8 * nodes} ranks ({'one node' if nodes == 1 else '2 nodes'}) in one process"
    assert printed.count(words) == printed.count("no checkpoints are saved") == 1


def write_config(folder: Path) -> str:
    config = folder / "fit.yaml"
    config.write_text("model: {class_path: tests.support.modules.GPTModule}")
    return str(config)


def test_page_of_a_strategy_without_a_plan_is_refused(
    trained: list[tuple[str, int | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    args = ["--config", write_config(tmp_path), "--hardware", "h100-80gb-nvlink", "--html", str(page)]
    assert main(["emulate", *args, "--strategy", "ddp"]) == 2
    assert capsys.readouterr().err == (
        "osdp: error: --html shows OSDP's plan: give --compare, or leave --strategy out\n"
    )
    assert trained == []


@pytest.mark.parametrize(("needed_bytes", "status"), [(3 * GIB, 1), (0, 2)])
@pytest.mark.parametrize("as_json", [False, True])
def test_comparison_of_which_all_fail_ends_with_the_first_error(
    needed_bytes: int,
    status: int,
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(_: Any, strategy: StrategyName, *__: Any) -> StrategyResult:
        sizes = {"needed_bytes": needed_bytes, "budget_bytes": GIB} if strategy == "osdp" else {}
        return StrategyResult(strategy=strategy, failure=f"{strategy} failed", **sizes)

    monkeypatch.setattr(emulate, "_train", train)
    args = ["--config", write_config(tmp_path), "--hardware", "h100-80gb-nvlink", "--compare"]
    assert main(["emulate", *args, *(["--json"] if as_json else [])]) == status
    printed = capsys.readouterr()
    assert printed.err == "osdp: error: osdp failed\n"
    if as_json:
        assert [row["error"] for row in json.loads(printed.out)] == [f"{each} failed" for each in emulate.STRATEGIES]


def test_page_that_is_not_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(_: Any, strategy: StrategyName, *__: Any) -> StrategyResult:
        return StrategyResult(strategy=strategy, batch_size=4, step_time_s=0.5, failure="no" * (strategy == "osdp"))

    monkeypatch.setattr(emulate, "_train", train)
    page = tmp_path / "page.html"
    args = ["--config", write_config(tmp_path), "--hardware", "h100-80gb-nvlink", "--html", str(page), "--compare"]
    assert main(["emulate", *args]) == 0
    assert f"osdp: warning: {page} is not written: OSDP has no plan to show" in capsys.readouterr().err
    assert not page.exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_strategy_that_takes_more_than_the_limit_is_marked(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = hand_made_plan({}, 8, batch_size=20)
    limit = plan.memory_limit_bytes
    peaks = {"osdp": limit, "ddp": limit + 3 * GIB, "fsdp": limit - 1, "fsdp2": limit}

    def train(_: Any, strategy: StrategyName, *__: Any) -> StrategyResult:
        its_plan = plan if strategy == "osdp" else None
        peak = peaks[strategy]
        return StrategyResult(strategy=strategy, batch_size=4, step_time_s=1, plan=its_plan, peak_memory_bytes=peak)

    monkeypatch.setattr(emulate, "_train", train)
    args = ["--config", write_config(tmp_path), "--hardware", "h100-80gb-nvlink", "--compare"]
    assert main(["emulate", *args, *(["--json"] if as_json else [])]) == 0
    printed = capsys.readouterr().out
    if as_json:
        assert [row["over_limit_bytes"] for row in json.loads(printed)] == [0, 3 * GIB, 0, 0]
    else:
        heading, *rows = printed[printed.index("strategy ") :].splitlines()
        assert heading.endswith("over limit")
        marked = [row for row in rows if row.rstrip().endswith("3.00 GiB")]
        assert len(marked) == 1
        assert marked[0].startswith("DDP")


def test_ddp_is_trained_again_with_each_argument_that_it_asks_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, bool]] = []
    words = ["enable find_unused_parameters=True", "try to use _set_static_graph()", "find_unused_parameters"]

    def train(_: Any, strategy: StrategyName, __: Any, settings: dict[str, bool], *___: Any) -> StrategyResult:
        tried.append(settings)
        return StrategyResult(strategy=strategy, failure=words[len(tried) - 1])

    monkeypatch.setattr(emulate, "_train_once", train)
    assert emulate._train(request("ddp"), "ddp", None, quiet=True).failure == "find_unused_parameters"
    assert tried == [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    tried.clear()
    emulate._train(request("fsdp"), "fsdp", None, quiet=True)
    assert tried == [{}]


@pytest.mark.parametrize(
    ("samples", "is_automatic", "expected"),
    [(64, True, 4), (256, False, 1), (64, False, "steps its optimizers itself"), (96, True, "no multiple of")],
)
def test_other_strategies_accumulate_to_the_global_batch_size(
    samples: int, is_automatic: bool, expected: int | str
) -> None:
    trainer: Any = SimpleNamespace(lightning_module=SimpleNamespace(automatic_optimization=is_automatic))
    if isinstance(expected, int):
        assert emulate_worker._accumulation(trainer, 256, samples) == expected
    else:
        with pytest.raises(ConfigurationError, match=expected):
            emulate_worker._accumulation(trainer, 256, samples)


@pytest.mark.parametrize("value", ['"12"', "true"])
@pytest.mark.parametrize("field", ["devices_per_node", "overlap"])
def test_text_and_truth_in_a_hardware_or_cluster_file_are_no_numbers(value: str, field: str, tmp_path: Path) -> None:
    described = hardware.load("h100-80gb-nvlink")
    for model in (described, hardware.build_cluster(described)):
        data = model.model_dump(mode="json") | {field: json.loads(value)}
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(data))
        with pytest.raises(ConfigurationError, match=f"field {field}: Input should be a valid"):
            resolve_cluster(str(file), None)


def test_ctrl_c_does_not_reach_the_process_that_trains() -> None:
    code = "import os, signal, sys; sys.stdin.read(); os.kill(os.getpid(), signal.SIGINT); sys.exit(7)"
    assert emulate._run_without_ctrl_c([sys.executable, "-c", code], "", None) == 7
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_exit_of_lightning_after_ctrl_c_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    monkeypatch.setattr(offline_plan, "_ConfigCLI", interrupted)
    with pytest.raises(KeyboardInterrupt):
        offline_plan.fit_config(SimpleNamespace(path=Path("fit.yaml")), lambda *_: None)  # type: ignore[arg-type, return-value]
