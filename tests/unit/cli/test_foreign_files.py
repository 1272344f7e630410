"""The command line replaces no file of another kind, and runs nothing that stands in the files it reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.cli import SaveConfigCallback

from lightning_osdp.cli import fit, main


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--config", "none.yaml", "--out"],
        ["plan", "--config", "none.yaml", "--html"],
        ["simulate", "--config", "none.yaml", "--hardware", "h100-80gb-nvlink", "--html"],
        ["emulate", "--config", "none.yaml", "--hardware", "h100-80gb-nvlink", "--html"],
        ["profile", "--devices", "1", "--accelerator", "cpu", "--out"],
    ],
)
@pytest.mark.parametrize("as_folder", [False, True])
def test_command_refuses_output_of_another_kind_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], as_folder: bool
) -> None:
    path = tmp_path / "mine"
    if as_folder:
        path.mkdir()
    (path / "model.py" if as_folder else path).write_text("import torch")
    assert main.main([*command, str(path)]) == 2
    error = capsys.readouterr().err
    assert (
        "mine can't be written: it is a folder" if as_folder else "mine is not replaced: it holds something"
    ) in error
    assert (path / "model.py" if as_folder else path).read_text() == "import torch"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/proc/x.json", "/proc/x.json can't be written: [Errno 2]"),
        ("/dev/null/x.json", "there is no folder /dev/null"),
        (f"{'a' * 300}.json", "can't be written: [Errno 36] File name too long"),
        ("missing/x.json", "can't be written: there is no folder"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--config", "none.yaml", "--out"],
        ["simulate", "--config", "none.yaml", "--hardware", "nothing", "--html"],
        ["profile", "--devices", "1", "--accelerator", "cpu", "--out"],
    ],
    ids=lambda command: command[0],
)
def test_output_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    path: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main([*command, path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.mkdir [{trace}]",
        "model: {{a: !!python/object/new:os.mkdir [{trace}]}}",
        "model: !!python/name:os.mkdir",
        "!!python/module:antigravity",
    ],
)
def test_code_in_yaml_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    config = tmp_path / "fit.yaml"
    config.write_text(text.format(trace=tmp_path / "trace"))
    assert main.main(["plan", "--config", str(config)]) == 2
    assert "fit.yaml can't be read" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("before", "is_saved"), [("trainer: {}  # my notes", False), ("# lightning.pytorch==2.5", True)]
)
def test_osdp_fit_saves_configuration_over_one_of_lightning_cli_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, is_saved: bool
) -> None:
    (tmp_path / "config.yaml").write_text(before)
    saved: list[Any] = []
    monkeypatch.setattr(SaveConfigCallback, "setup", lambda self, trainer, module, stage: saved.append(stage))
    parts: Any = None
    callback = fit._SaveConfig(parts, parts, overwrite=True)
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer: Any = SimpleNamespace(log_dir=str(tmp_path), strategy=strategy)
    if is_saved:
        callback.setup(trainer, parts, "fit")
    else:
        with pytest.warns(UserWarning, match=r"LightningCLI did not write .*config\.yaml"):
            callback.setup(trainer, parts, "fit")
    assert saved == ["fit"] * is_saved
    assert (tmp_path / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--config", "none.yaml"],
        ["simulate", "--config", "none.yaml", "--hardware", "nothing"],
        ["explain", "none.json"],
        ["emulate", "--config", "none.yaml", "--hardware", "nothing"],
    ],
    ids=lambda command: command[0],
)
def test_page_without_matplotlib_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr(main, "util", SimpleNamespace(find_spec=lambda name: None))
    assert main.main([*command, "--html", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'lightning-osdp[pictures]'")
