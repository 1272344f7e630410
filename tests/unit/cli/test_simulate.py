"""``osdp simulate``: plans of an example for hardware that is not here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_osdp.cli import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "cli" / "fit.yaml"
HARDWARE = ("--config", str(EXAMPLE), "--hardware", "2xtitan-rtx-pcie3+10gbit", "--max-batch-size", "8")

# Lightning 2.6 calls what jsonargparse 4.53 is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


@pytest.fixture(autouse=True)
def restore_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import path and the example's modules as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model", raising=False)


def test_simulate_json_has_one_entry_per_device_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["simulate", *HARDWARE, "--devices", "2", "16", "--memory-limit", "60MiB", "--json"]) == main.DONE
    found = json.loads(capsys.readouterr().out)
    assert [(entry["devices"], entry["nodes"]) for entry in found] == [(2, 1), (16, 2)]
    for entry in found:
        assert entry["dp"] is None
        assert entry["osdp"]["peak_memory_bytes"] <= 60 << 20


def test_simulate_by_default_doubles_devices_up_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["simulate", *HARDWARE, "--json"]) == main.DONE
    assert [entry["devices"] for entry in json.loads(capsys.readouterr().out)] == [1, 2, 4, 8, 16]


def simulate_changed_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: dict[str, object], *options: str, **trainer: object
) -> dict[str, Any]:
    """The plan on two devices of the example's file with other arguments."""
    config = yaml.safe_load(EXAMPLE.read_text())
    own = {"class_path": "lightning_osdp.OSDPStrategy", "init_args": strategy}
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(config | {"trainer": config["trainer"] | trainer | {"strategy": own}}))
    (tmp_path / "model.py").write_text((EXAMPLE.parent / "model.py").read_text())
    given = ("--config", str(file), *HARDWARE[2:4], "--devices", "2", *options, "--json")
    assert main.main(["simulate", *given]) == main.DONE
    (found,) = json.loads(capsys.readouterr().out)
    return dict(found["osdp"])


@pytest.mark.parametrize(
    ("strategy", "options", "batch_size", "in_all"),
    [
        ({"batch_size": "keep"}, (), 16, 16 * 2 * 4),
        ({"batch_size": 6}, (), 6, 6 * 2 * 4),
        ({"batch_size": 6}, ("--batch-size", "5"), 5, 5 * 2 * 4),
        ({"max_batch_size": 3, "min_steps_per_epoch": 1}, (), 3, 3 * 2 * 4),
        ({"global_batch_size": "keep", "max_batch_size": 8}, (), 8, 16 * 2 * 4),
    ],
)
def test_simulate_takes_batch_sizes_and_accumulation_of_the_file(
    strategy: dict[str, object],
    options: tuple[str, ...],
    batch_size: int,
    in_all: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = simulate_changed_example(tmp_path, capsys, strategy, *options, accumulate_grad_batches=4)
    assert (found["batch_size"], found["global_batch_size"]) == (batch_size, in_all)


def test_simulate_takes_the_type_of_the_files_precision_unless_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step_s(precision: str, *options: str) -> float:
        given = ("--devices", "1", *options)
        found = simulate_changed_example(tmp_path, capsys, {"batch_size": 64}, *given, precision=precision)
        return float(found["step_time_s"])

    assert step_s("16-true") < step_s("16-true", "--dtype", "fp32")
    assert step_s("32-true", "--dtype", "fp16") < step_s("32-true")


def test_simulate_counts_copies_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def peak_bytes(**trainer: object) -> int:
        strategy = {"batch_size": "keep"}
        return int(simulate_changed_example(tmp_path, capsys, strategy, **trainer)["peak_memory_bytes"])

    averaging = {
        "class_path": "lightning.pytorch.callbacks.StochasticWeightAveraging",
        "init_args": {"swa_lrs": 0.1, "device": None},
    }
    assert peak_bytes(callbacks=[averaging]) > 1.1 * peak_bytes()


def test_simulate_with_clipping_needs_memory_for_all_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def needed_bytes(**trainer: object) -> int:
        config = yaml.safe_load(EXAMPLE.read_text())
        file = tmp_path / "fit.yaml"
        file.write_text(yaml.safe_dump(config | {"trainer": config["trainer"] | trainer}))
        (tmp_path / "model.py").write_text((EXAMPLE.parent / "model.py").read_text())
        given = ("--config", str(file), *HARDWARE[2:], "--devices", "2", "--memory-limit", "1MiB", "--json")
        assert main.main(["simulate", *given]) == main.INFEASIBLE
        (found,) = json.loads(capsys.readouterr().out)
        return int(found["needed_bytes"])

    assert needed_bytes() < needed_bytes(gradient_clip_val=1.0)


def test_simulate_html_shows_largest_device_count_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    limit = ("--memory-limit", "40MiB")
    assert main.main(["simulate", *HARDWARE, "--devices", "1", "8", *limit, "--html", str(page)]) == main.DONE
    assert "does not fit" in capsys.readouterr().out
    assert "parameters on 8 devices" in page.read_text()


def test_simulate_when_nothing_fits_writes_no_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    limit = ("--memory-limit", "1MiB")
    assert main.main(["simulate", *HARDWARE, "--devices", "2", *limit, "--html", str(page)]) == main.INFEASIBLE
    captured = capsys.readouterr()
    assert "nothing fits: 2 devices need" in captured.err
    assert "does not fit" in captured.out
    assert not page.exists()


def test_simulate_when_nothing_fits_exits_1_with_all_device_counts(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--devices", "1", "2", "--memory-limit", "1MiB", "--json")
    assert main.main(["simulate", *HARDWARE, *given]) == main.INFEASIBLE
    captured = capsys.readouterr()
    assert [entry["osdp"] for entry in json.loads(captured.out)] == [None, None]
    assert captured.err.startswith("osdp: error: nothing fits: 2 devices need ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--hardware", "abacus"), "no hardware is called 'abacus'"),
        (("--dtype", "bf16"), "no peak FLOP/s for 'bf16': give 'fp32' or 'fp16'"),
        (("--devices", "32"), "has 1 to 16 devices, not 32"),
        (("--max-batch-size", "0"), "max_batch_size"),
    ],
)
def test_simulate_with_invalid_input_prints_one_line_error(
    change: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["simulate", *HARDWARE, *change]) == main.BAD_INPUT
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_plan_with_html_option_writes_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    limit = "16GiB"  # the process that runs all tests is a large one
    wishes = ("--devices", "1", "--batch-size", "2", "--memory-limit", limit, "--cache", str(tmp_path / "cache"))
    assert main.main(["plan", "--config", str(EXAMPLE), *wishes, "--html", str(page)]) == main.DONE
    text = page.read_text()
    assert "parameters on 1 device<" in text
    for picture in ("Memory along one training step", "Step time against memory"):
        assert f'alt="{picture}"' in text
