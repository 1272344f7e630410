"""The command line: exit status, one-line errors, JSON, and the YAML that LightningCLI takes unchanged."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_osdp.cli import main, measure_links, offline_plan
from lightning_osdp.errors import ConfigurationError, OSDPError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy import offline
from lightning_osdp.strategy.osdp import OSDPStrategy
from tests.support.models import hand_made_plan, some_cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "cli" / "fit.yaml"

# Lightning 2.6 calls what jsonargparse 4.53 is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def osdp(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: exit status, standard output, standard error."""

    def run(*args: object) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main.main([str(arg) for arg in args])
        return status, *capfd.readouterr()

    return run


@pytest.fixture(autouse=True)
def restore_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import path and the example's modules as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model", raising=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compute is measured once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small fit.yaml, a cluster of two ranks and two plans."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["model"]["init_args"] |= {"width": 64, "depth": 2}
    config["trainer"]["strategy"]["init_args"] |= {"memory_limit": "4GiB", "max_batch_size": 6}
    write_yaml(tmp_path / "fit.yaml", config)
    (tmp_path / "model.py").write_text((EXAMPLE.parent / "model.py").read_text() + 'print("not of osdp\'s output")\n')
    (tmp_path / "cluster.json").write_text(some_cluster(2).model_dump_json())
    (tmp_path / "a.json").write_text(hand_made_plan({"up": Mode.DP}, 2).to_json())
    (tmp_path / "b.json").write_text(hand_made_plan({"up": Mode.ZDP}, 2, batch_size=3).to_json())
    return tmp_path


def write_yaml(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def run_plan(osdp: Run, folder: Path, cache: Path, *more: object) -> tuple[int, str, str]:
    return osdp("plan", "--config", folder / "fit.yaml", "--cluster", folder / "cluster.json", "--cache", cache, *more)


# -- profile -----------------------------------------------------------------------------------------------------------


def test_profile_writes_cluster_and_leaves_no_processes(osdp: Run, tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    status, text, _ = osdp("profile", "--devices", 2, "--accelerator", "cpu", "--out", out, "--timeout", 200, "--json")
    assert status == main.DONE
    cluster = Cluster.model_validate_json(out.read_text())
    assert cluster == Cluster.model_validate_json(text)
    assert (cluster.ranks, cluster.device, cluster.backend) == (2, "cpu", "gloo")
    assert cluster.link.all_gather.time_s(16 << 20, 2) > 0
    assert multiprocessing.active_children() == []


def test_profile_past_timeout_fails_and_leaves_no_processes(osdp: Run, tmp_path: Path) -> None:
    status, _, error = osdp("profile", "--devices", 2, "--accelerator", "cpu", "--timeout", 0.01)
    assert status == main.BAD_INPUT
    assert "not done after 0.01 s" in error
    assert multiprocessing.active_children() == []


def test_measure_cluster_with_failing_rank_raises_and_leaves_no_processes() -> None:
    with pytest.raises(OSDPError, match=r"rank \d failed to measure the links: KeyError: 'meta'"):
        measure_links.measure_cluster(2, "meta", timeout_s=120)
    assert multiprocessing.active_children() == []


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_uses_strategy_settings_of_config(osdp: Run, folder: Path, cache: Path) -> None:
    out = folder / "plan.json"
    status, text, error = run_plan(osdp, folder, cache, "--out", out)
    assert status == main.DONE, error
    assert text.startswith("Execution plan for")
    plan = ExecutionPlan.from_json(out.read_text())
    assert plan.memory_limit_bytes == 4 << 30
    assert max(point.batch_size for point in plan.frontier) == 6
    assert [op.name for op in plan.operators] == ["first", "hidden.0", "hidden.1", "last"]
    assert plan.cluster == some_cluster(2)


def test_plan_options_override_config(osdp: Run, folder: Path, cache: Path) -> None:
    wishes = ("--memory-limit", "3GiB", "--batch-size", 5, "--devices", 4)
    status, text, error = run_plan(osdp, folder, cache, *wishes, "--json")
    assert status == main.DONE, error
    plan = ExecutionPlan.from_json(text)
    assert (plan.memory_limit_bytes, plan.batch_size, plan.cluster.ranks) == (3 << 30, 5, 4)


def test_plan_with_global_batch_size_reaches_it(osdp: Run, folder: Path, cache: Path) -> None:
    status, text, _ = run_plan(osdp, folder, cache, "--global-batch-size", 24, "--json")
    plan = ExecutionPlan.from_json(text)
    assert status == main.DONE
    assert plan.batch_size * plan.accumulate_grad_batches * 2 == 24


def test_plan_accepts_fit_section_with_ckpt_path_and_no_datamodule(osdp: Run, folder: Path, cache: Path) -> None:
    config = yaml.safe_load((folder / "fit.yaml").read_text())
    config["model"] = {"class_path": "tests.support.modules.GPTModule"}
    del config["data"]
    write_yaml(folder / "fit.yaml", {"fit": config | {"ckpt_path": "none.ckpt"}})
    status, text, error = run_plan(osdp, folder, cache, "--json", "--batch-size", 2)
    assert status == main.DONE, error
    assert "model.blocks.0.qkv" in [op.name for op in ExecutionPlan.from_json(text).operators]


def test_plan_for_one_device_needs_no_cluster(osdp: Run, folder: Path, cache: Path) -> None:
    status, text, error = osdp("plan", "--config", folder / "fit.yaml", "--devices", 1, "--cache", cache, "--json")
    assert status == main.DONE, error
    assert ExecutionPlan.from_json(text).predicted.communication_time_s == 0


def test_plan_reports_cluster_ranks_that_differ_from_config(osdp: Run, folder: Path, cache: Path) -> None:
    (folder / "cluster.json").write_text(some_cluster(4).model_dump_json())
    status, _, error = run_plan(osdp, folder, cache, "--json")
    assert status == main.DONE
    assert "trains on 2 ranks, the cluster has 4" in error


def test_plan_when_nothing_fits_returns_status_1_and_suggestions(osdp: Run, folder: Path, cache: Path) -> None:
    status, text, error = run_plan(osdp, folder, cache, "--memory-limit", "1MiB", "--json")
    assert status == main.INFEASIBLE
    assert error.splitlines()[-1].startswith("osdp: error: nothing fits")
    assert "What would fit: a memory_limit of" in error
    found = json.loads(text)
    assert found["feasible"] is False
    assert found["needed_bytes"] > found["memory_limit_bytes"] == 1 << 20


LOOKING = {"class_path": "tests.e2e.test_optimizer_in_backward.Looks"}
GATHERED = {"class_path": "lightning_osdp.OSDPCallback", "init_args": {"tensor_parallel": False}}


@pytest.mark.slow
def test_plan_updates_in_backward_only_where_training_can(
    osdp: Run, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_osdp.autotune.coordinator.process_overhead", lambda *_: 0)
    config = yaml.safe_load((folder / "fit.yaml").read_text())
    config["model"]["init_args"]["width"] = 512
    config["trainer"]["callbacks"] = [GATHERED]  # slices that stay cut take less than any update in backward

    def planned_with(limit_bytes: int, strategy: dict[str, Any], **trainer: Any) -> tuple[int, dict[str, Any]]:
        own = config["trainer"]["strategy"]
        own = own | {"init_args": own["init_args"] | {"memory_limit": limit_bytes, "batch_size": 2} | strategy}
        write_yaml(folder / "fit.yaml", config | {"trainer": config["trainer"] | {"strategy": own} | trainer})
        status, text, _ = run_plan(osdp, folder, cache, "--json", "--html", folder / "page.html")
        return status, json.loads(text)

    _, nothing = planned_with(1, {"update_in_backward": False})
    limit_bytes = nothing["needed_bytes"] - (256 << 10)  # of gradients there are 1.1 MiB
    status, plan = planned_with(limit_bytes, {})
    assert (status, plan["update_in_backward"]) == (main.DONE, True)
    assert (folder / "page.html").exists()
    assert planned_with(limit_bytes, {"update_in_backward": False})[0] == main.INFEASIBLE
    assert planned_with(limit_bytes, {}, gradient_clip_val=1.0)[0] == main.INFEASIBLE
    assert planned_with(limit_bytes, {}, callbacks=[GATHERED, LOOKING])[0] == main.INFEASIBLE


def test_plan_with_unsupported_callback_is_rejected(osdp: Run, folder: Path, cache: Path) -> None:
    config = yaml.safe_load((folder / "fit.yaml").read_text())
    pruning = {"class_path": "lightning.pytorch.callbacks.ModelPruning", "init_args": {"pruning_fn": "l1_unstructured"}}
    write_yaml(folder / "fit.yaml", config | {"trainer": config["trainer"] | {"callbacks": [pruning]}})
    status, _, error = run_plan(osdp, folder, cache)
    assert status == main.BAD_INPUT
    assert "ModelPruning puts masked copies in the place of weights" in error


def test_plan_without_cluster_suggests_osdp_profile(osdp: Run, folder: Path) -> None:
    status, text, error = osdp("plan", "--config", folder / "fit.yaml")
    assert (status, text) == (main.BAD_INPUT, "")
    assert "run `osdp profile --devices 2 --out cluster.json`" in error


def test_plan_with_cluster_of_missing_device_type_is_rejected(
    osdp: Run, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "default_device_type", lambda: "cpu")
    (folder / "cluster.json").write_text(some_cluster(2, device="cuda: NVIDIA H200").model_dump_json())
    status, _, error = run_plan(osdp, folder, cache)
    assert status == main.BAD_INPUT
    assert "the cluster's devices are cuda: NVIDIA H200, here is only cpu" in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"class_path": "model.Nobody"}}, "Nobody"),
        ({"model": {"class_path": "model.Classifier", "init_args": {"width": "wide"}}}, "width"),
        ({"data": {"class_path": "model.Points", "init_args": {"samples": -3}}}, "model.py"),
        ({"trainer": {"devices": 2, "speed": "high"}}, "speed"),
        ({"model": None}, "has no section 'model'"),
    ],
)
def test_plan_with_invalid_config_prints_one_line_error(
    osdp: Run, folder: Path, cache: Path, change: dict[str, Any], words: str
) -> None:
    write_yaml(folder / "fit.yaml", yaml.safe_load((folder / "fit.yaml").read_text()) | change)
    status, text, error = run_plan(osdp, folder, cache)
    assert (status, text) == (main.BAD_INPUT, "")
    assert "Traceback" not in error
    last = error.splitlines()[-1]
    assert last.startswith("osdp: error: ")
    assert words in last


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--memory-limit", "3 gigs"), "3 gigs"),
        (("--batch-size", "-1"), "batch_size=-1 is not a positive whole number"),
        (("--batch-size", "many"), "batch_size"),
        (("--devices", "0"), "devices=0"),
        (("--global-batch-size", "7"), "not a multiple of the 2 ranks"),
        (("--out", "/no/such/folder/plan.json"), "can't be written"),
        (("--colour", "blue"), "colour"),
    ],
)
def test_plan_with_invalid_option_prints_one_line_error(
    osdp: Run, folder: Path, cache: Path, more: tuple[str, ...], words: str
) -> None:
    status, _, error = run_plan(osdp, folder, cache, *more)
    assert status == main.BAD_INPUT
    assert words in error.splitlines()[-1]
    assert "Traceback" not in error


def test_lightning_cli_accepts_example_config_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    made = LightningCLI(run=False, args=["--config", str(EXAMPLE)], save_config_callback=None)
    assert isinstance(made.trainer.strategy, OSDPStrategy)
    assert made.trainer.num_devices == 2
    assert type(made.model).__name__ == "Classifier"
    assert offline_plan.load_config(EXAMPLE).planning_args == {"memory_limit": "640MiB", "max_batch_size": 64}


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ({"devices": 2}, 2),
        ({"devices": "4", "num_nodes": 2}, 8),
        ({"devices": [0, 3]}, 2),
        ({"devices": "auto"}, None),
        ({"devices": -1}, None),
        ({}, None),
        (None, None),
    ],
)
def test_training_config_rank_count_follows_trainer_section(trainer: dict[str, Any] | None, ranks: int | None) -> None:
    assert offline_plan.TrainingConfig(Path("fit.yaml"), {"model": {}, "trainer": trainer}).num_ranks == ranks


def test_load_config_reads_sections_from_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("class_path: net.Net\ninit_args: {width: 8}")
    (tmp_path / "fit.yaml").write_text("model: model.yaml\ndata: net.Data")
    sections = offline_plan.load_config(tmp_path / "fit.yaml").sections
    assert sections == {"model": {"class_path": "net.Net", "init_args": {"width": 8}}, "data": "net.Data"}


def test_load_config_of_invalid_yaml_raises_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text("model: [")
    with pytest.raises(ConfigurationError, match=r"fit\.yaml can't be read"):
        offline_plan.load_config(tmp_path / "fit.yaml")


# -- explain, diff and usage -------------------------------------------------------------------------------------------


def test_explain_prints_text_and_json(osdp: Run, folder: Path, cache: Path) -> None:
    run_plan(osdp, folder, cache, "--out", folder / "plan.json")
    status, text, _ = osdp("explain", folder / "plan.json")
    assert status == main.DONE
    assert "hidden.0-1: dp." in text
    assert "price of memory: nothing" in text
    status, text, _ = osdp("explain", folder / "plan.json", "--json")
    assert status == main.DONE
    assert ["hidden.0-1"] in [reason["operators"] for reason in json.loads(text)["operators"]]


def test_diff_prints_text_and_json(osdp: Run, folder: Path) -> None:
    status, text, _ = osdp("diff", folder / "a.json", folder / "b.json")
    assert status == main.DONE
    assert "up: dp -> zdp" in text.splitlines()
    assert "batch size: 1 -> 3 (+200.0%)" in text.splitlines()
    status, text, _ = osdp("diff", folder / "a.json", folder / "b.json", "--json")
    assert {"what": "up", "before": "dp", "after": "zdp", "relative": None} in json.loads(text)["decision"]
    assert osdp("diff", folder / "a.json", folder / "a.json") == (main.DONE, "no difference\n", "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "command"),
        (("bogus",), "bogus"),
        (("explain",), "plan"),
        (("explain", "none.json"), "none.json can't be read"),
        (("explain", "cluster.json"), "not an execution plan"),
        (("diff", "a.json"), "after"),
        (("profile", "--devices", "0"), "devices=0"),
        (("plan",), "config"),
    ],
)
def test_invalid_usage_returns_status_2_and_one_line_error(
    osdp: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(folder)
    status, text, error = osdp(*args)
    assert (status, text) == (main.BAD_INPUT, "")
    (line,) = error.splitlines()
    assert line.startswith("osdp: error: ")
    assert words in line


def test_help_lists_every_command(osdp: Run) -> None:
    status, text, _ = osdp("--help")
    assert status == main.DONE
    assert all(name in text and command.help in " ".join(text.split()) for name, command in main.COMMANDS.items())


def test_cli_as_program_returns_exit_status(folder: Path) -> None:
    program = [sys.executable, "-m", "lightning_osdp.cli.main", "explain", folder / "cluster.json"]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize("args", [("explain", "a.json"), ("diff", "a.json", "b.json"), ("explain", "a.json", "--json")])
def test_full_disk_under_standard_output_is_one_line_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    own = os.dup(1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    try:
        with open(1, "w", closefd=False) as output, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            assert main.main([*args]) == main.BAD_INPUT
    finally:
        os.dup2(own, 1)
    assert capfd.readouterr().err == "osdp: error: the standard output can't be written: No space left on device\n"


@pytest.mark.parametrize("kind", [GeneratorExit, BaseException, KeyError])
def test_error_of_any_class_returns_status_2_and_is_described(
    osdp: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail(_: Any) -> None:
        raise kind("no more rows")

    command = main.COMMANDS["explain"]
    monkeypatch.setitem(main.COMMANDS, "explain", main.Command(command.help, command.add_arguments, fail))
    status, _, error = osdp("explain", folder / "a.json")
    assert status == main.BAD_INPUT
    assert error.startswith(f"osdp: error: {kind.__name__}: ")
    assert "Traceback" not in error
