"""Only what was written as a checkpoint, or as a file of its kind, is ever replaced or removed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_osdp.errors import CheckpointError, ConfigurationError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state import atomic_files
from lightning_osdp.strategy.plan_logging import write_and_log_plan


def save_file(path: Path, value: int = 1) -> None:
    torch.save({"value": value}, path)


def save_folder(path: Path, value: int = 1) -> None:
    path.mkdir()
    torch.save({"format": atomic_files.FORMAT_NAME, "value": value}, path / atomic_files.TRAINER_FILE)
    (path / "__0_0.distcp").write_bytes(b"x")


def save_old_and_new(folder: Path) -> tuple[Path, Path]:
    """A checkpoint with the value 1, and one with 2 that is to replace it."""
    target, complete = folder / "last.ckpt", folder / "complete"
    save_folder(target, 1)
    save_folder(complete, 2)
    return target, complete


def read_value(path: Path) -> int:
    value: int = torch.load(path / atomic_files.TRAINER_FILE if path.is_dir() else path)["value"]
    return value


def list_contents(folder: Path) -> dict[str, bytes | str]:
    """All files and links below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def make_ordinary_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")


def make_empty_folder(path: Path) -> None:
    path.mkdir()


def make_folder_with_trainer_file(path: Path) -> None:
    path.mkdir()
    (path / atomic_files.TRAINER_FILE).write_text("my own trainer")


def make_checkpoint_with_notes(path: Path) -> None:
    save_folder(path)
    (path / "notes.txt").write_text("this one is the best")


def make_checkpoint_with_subfolder(path: Path) -> None:
    save_folder(path)
    (path / "__1_0.distcp").mkdir()


def make_text(path: Path) -> None:
    path.write_text("hello")


def make_other_zip(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "a letter")


def make_link_to_folder(path: Path) -> None:
    make_ordinary_folder(path.parent / "data")
    path.symlink_to("data")


def make_link_to_text(path: Path) -> None:
    (path.parent / "data.txt").write_text("hello")
    path.symlink_to("data.txt")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


FOREIGN = [
    make_ordinary_folder,
    make_empty_folder,
    make_folder_with_trainer_file,
    make_checkpoint_with_notes,
    make_checkpoint_with_subfolder,
    make_text,
    make_other_zip,
    make_link_to_folder,
    make_link_to_text,
    make_pipe,
]


@pytest.mark.parametrize("make", FOREIGN)
@pytest.mark.parametrize("save", [save_file, save_folder])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing_foreign_content_raises_and_leaves_all_as_it_was(
    tmp_path: Path,
    make: Callable[[Path], None],
    save: Callable[[Path], None],
    can_exchange: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic_files, "_exchange", lambda one, other: False)
    target = tmp_path / "last.ckpt"
    make(target)
    before = list_contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint is written to .*last\.ckpt: it is"):
        atomic_files.start(target)
    other = tmp_path / "complete"
    save(other)
    with pytest.raises(CheckpointError, match="only checkpoints are replaced"):
        atomic_files.replace(other, target)
    atomic_files.remove(other)
    assert list_contents(tmp_path) == before


def test_replacing_folder_that_becomes_foreign_just_then_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, complete = save_old_and_new(tmp_path)
    exchange = atomic_files._exchange

    def exchange_late(one: Path, other: Path) -> bool:
        if not (tmp_path / "seen").exists():
            (target / "notes.txt").write_text("mine")
            (tmp_path / "seen").touch()
        return exchange(one, other)

    monkeypatch.setattr(atomic_files, "_exchange", exchange_late)
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        atomic_files.replace(complete, target)
    assert (target / "notes.txt").read_text() == "mine"
    assert read_value(target) == 1


@pytest.mark.parametrize("before", ["zip", "legacy", "empty", "cut", "dangling link", "link to checkpoint"])
def test_replacing_checkpoint_of_any_program_works(tmp_path: Path, before: str) -> None:
    target = tmp_path / "last.ckpt"
    if before == "legacy":
        torch.save({"value": 1}, target, _use_new_zipfile_serialization=False)
    elif before == "empty":
        target.touch()
    elif before == "dangling link":
        target.symlink_to("nowhere")
    elif before == "link to checkpoint":
        save_folder(tmp_path / "best.ckpt", 1)
        target.symlink_to("best.ckpt")
    else:
        save_file(target)
    if before == "cut":
        target.write_bytes(target.read_bytes()[:200])
    with atomic_files.atomic_write(target) as unfinished:
        save_folder(unfinished, 2)
    assert read_value(target) == 2
    assert before != "link to checkpoint" or read_value(tmp_path / "best.ckpt") == 1


@pytest.mark.parametrize("name", ["a" * 231, "a" * 255, "é" * 127, "a" * 250 + ".ckpt"])
@pytest.mark.parametrize("save", [save_file, save_folder])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing_works_with_names_as_long_as_file_system_allows(
    tmp_path: Path, name: str, save: Callable[..., None], can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic_files, "_exchange", lambda one, other: False)
    for value in (1, 2):
        with atomic_files.atomic_write(tmp_path / name) as unfinished:
            save(unfinished, value)
        assert read_value(tmp_path / name) == value
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("moment", ["before second rename", "before removal"])
def test_save_after_kill_without_exchange_works_and_tidies_up(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "_exchange", lambda one, other: False)
    target = tmp_path / "last.ckpt"
    save_folder(tmp_path / ".last.ckpt.osdp-previous", 1)  # where a kill leaves it
    if moment == "before removal":
        save_folder(target, 2)
    for value in (3, 4):
        with atomic_files.atomic_write(target) as unfinished:
            assert read_value(target) == (value - 1 if value == 4 or moment == "before removal" else 1)
            save_folder(unfinished, value)
        assert read_value(target) == value
        assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_failing_second_rename_without_exchange_puts_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "_exchange", lambda one, other: False)
    target, complete = save_old_and_new(tmp_path)
    rename = os.rename

    def fail_once(source: Path, to: Path) -> None:
        if source == complete:
            raise OSError("the server is gone")
        rename(source, to)

    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(OSError, match="the server is gone"):
        atomic_files.replace(complete, target)
    assert read_value(target) == 1


def test_restore_by_a_reader_between_two_renames_does_not_fail_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "_exchange", lambda one, other: False)
    target, complete = save_old_and_new(tmp_path)
    rename, restored = os.rename, []

    def restore_in_between(source: Path, to: Path) -> None:
        rename(source, to)
        if source == target and not restored:
            restored.append(True)
            atomic_files.restore(target)

    monkeypatch.setattr(os, "rename", restore_in_between)
    atomic_files.replace(complete, target)
    assert read_value(target) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def find_dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_leftovers_of_others_that_hold_anything_else_are_never_removed(tmp_path: Path) -> None:
    host, pid = socket.gethostname(), find_dead_process()
    for name in (".notes.osdp-saving", f".a.ckpt.elsewhere.{pid}.osdp-saving", f".b.{host}.{pid}.osdp-saving"):
        folder = tmp_path / name
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "thesis.txt").write_text("years of work")
        os.utime(folder, (0, 0))
    text = tmp_path / f".c.elsewhere.{pid}.osdp-saving"
    text.write_text("hello")
    os.utime(text, (0, 0))
    before = list_contents(tmp_path)
    atomic_files.remove_leftovers(tmp_path)
    assert list_contents(tmp_path) == before


def test_leftover_of_container_with_same_host_name_counts_as_another_hosts(tmp_path: Path) -> None:
    host, pid = socket.gethostname(), find_dead_process()
    same = tmp_path / f".a.{atomic_files._machine_id()}.{host}.{pid}.osdp-saving"
    other = tmp_path / f".a.0123abcd.{host}.{pid}.osdp-saving"
    for path in (same, other):
        path.touch()
    atomic_files.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("call", ["unlink", "lstat", "iterdir", "rmdir"])
@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_clean_up_that_fails_does_not_fail_save(
    tmp_path: Path, call: str, error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's leftovers can't be removed, and another host may remove them just then."""
    leftover = tmp_path / f".a.{socket.gethostname()}.{find_dead_process()}.osdp-saving"
    save_folder(leftover)
    other_host = tmp_path / ".b.elsewhere.1.osdp-saving"
    other_host.touch()
    original = getattr(Path, call)

    def fail(self: Path, *args: object, **named: object) -> object:
        if self.name.endswith("osdp-saving") or "osdp-saving" in self.parent.name:
            raise error(f"{call} {self}")
        return original(self, *args, **named)

    monkeypatch.setattr(Path, call, fail)
    target = tmp_path / "last.ckpt"
    for value in (1, 2):
        with atomic_files.atomic_write(target) as unfinished:
            save_file(unfinished, value)
        assert read_value(target) == value


@pytest.mark.parametrize("make", [make_ordinary_folder, make_text, make_other_zip, make_link_to_text])
def test_write_text_over_foreign_content_raises(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "plan.json"
    make(path)
    before = list_contents(tmp_path)
    with pytest.raises(ConfigurationError, match=r"plan\.json (is not replaced|can't be written: it is a folder)"):
        atomic_files.write_text(path, "{}", ExecutionPlan.is_plan)
    assert list_contents(tmp_path) == before


def test_write_text_replaces_own_file_and_writes_through_links_and_to_devices(tmp_path: Path) -> None:
    text = '{"format": "lightning_osdp.plan"}'
    (tmp_path / "plan.json").write_text(text)
    (tmp_path / "link.json").symlink_to("plan.json")
    atomic_files.write_text(tmp_path / "link.json", text + "\n", ExecutionPlan.is_plan)
    assert (tmp_path / "plan.json").read_text() == text + "\n"
    assert (tmp_path / "link.json").is_symlink()
    atomic_files.write_text(Path("/dev/null"), text, ExecutionPlan.is_plan)
    assert Path("/dev/null").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "plan.json"]


def test_write_text_that_fails_leaves_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cached.json"
    path.write_text("{}")
    write_text = Path.write_text

    def fail_midway(self: Path, text: str, **named: str) -> int:
        write_text(self, text[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail_midway)
    with pytest.raises(OSError, match="No space left"):
        atomic_files.write_text(path, '{"a": 1}', None)
    assert list_contents(tmp_path) == {"cached.json": b"{}"}


def test_write_plan_over_foreign_file_warns_and_leaves_it(tmp_path: Path) -> None:
    plan = ExecutionPlan.model_construct()
    path = tmp_path / "osdp_plan.json"
    path.write_text("mine")
    with pytest.warns(UserWarning, match="holds something that osdp did not write"):
        write_and_log_plan(plan, path, [])
    assert path.read_text() == "mine"
