from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_osdp.errors import CheckpointError
from lightning_osdp.state import atomic_files
from lightning_osdp.state.opened_file import OpenedFile


def write(path: Path, text: str, as_folder: bool) -> None:
    """Writes what counts as a checkpoint, with a text in it."""
    contents: dict[str, str] = {"text": text}
    if as_folder:
        path.mkdir()
        path = path / atomic_files.TRAINER_FILE
        contents = {"format": atomic_files.FORMAT_NAME, "text": text}
    torch.save(contents, path)


def read(path: Path) -> str:
    text: str = torch.load(path / atomic_files.TRAINER_FILE if path.is_dir() else path)["text"]
    return text


@pytest.mark.parametrize("before", ["nothing", "file", "folder", "link"])
@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing_swaps_in_new_file_or_folder(
    tmp_path: Path, before: str, as_folder: bool, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic_files, "_exchange", lambda one, other: False)
    target = tmp_path / "run.1" / "last.ckpt"
    target.parent.mkdir()
    if before == "link":
        write(tmp_path / "elsewhere", "old", False)
        target.symlink_to(tmp_path / "elsewhere")
    elif before != "nothing":
        write(target, "old", before == "folder")
    with atomic_files.atomic_write(target) as unfinished:
        write(unfinished, "new", as_folder)
        assert before == "nothing" or read(target) == "old"
    assert read(target) == "new"
    assert [path.name for path in target.parent.iterdir()] == ["last.ckpt"]
    assert before != "link" or read(tmp_path / "elsewhere") == "old"


@pytest.mark.parametrize("as_folder", [False, True])
def test_replacing_on_failure_keeps_old_and_leaves_no_leftovers(tmp_path: Path, as_folder: bool) -> None:
    target = tmp_path / "last.ckpt"
    write(target, "old", as_folder)

    def fail() -> None:
        with atomic_files.atomic_write(target) as unfinished:
            write(unfinished, "half", as_folder)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert read(target) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_remove_leftovers_removes_those_of_ended_processes_and_old_ones(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    host = socket.gethostname()
    gone = tmp_path / f".a.ckpt.{host}.{process.pid}{atomic_files.UNFINISHED_SUFFIX}"
    living = tmp_path / f".a.ckpt.{host}.{os.getppid()}{atomic_files.UNFINISHED_SUFFIX}"
    other_host = tmp_path / f".a.ckpt.elsewhere.{process.pid}{atomic_files.UNFINISHED_SUFFIX}"
    old = tmp_path / f".b.ckpt.elsewhere.{process.pid}{atomic_files.UNFINISHED_SUFFIX}"
    gone.mkdir()
    (gone / "part").write_text("")
    for path in (living, other_host, old):
        path.write_text("")
    os.utime(old, (0, 0))
    atomic_files.remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {living, other_host}


def test_restore_puts_previous_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "last.ckpt"
    write(target, "old", True)
    os.rename(target, tmp_path / ".last.ckpt.osdp-previous")  # where a kill between two renames leaves it
    atomic_files.restore(target)
    assert read(target) == "old"


def verify_and_load(path: Path) -> None:
    opened = OpenedFile(path)
    opened.verify()
    opened.load(True)


def save_checkpoint_file(path: Path) -> Path:
    torch.save({"a": torch.arange(1000.0), "b": {"c": 1}}, path)
    return path


def test_verify_accepts_intact_file_with_or_without_crc(tmp_path: Path) -> None:
    OpenedFile(save_checkpoint_file(tmp_path / "a.ckpt")).verify()
    torch.serialization.set_crc32_options(False)
    try:
        OpenedFile(save_checkpoint_file(tmp_path / "b.ckpt")).verify()
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("damage", ["cut", "flip", "other compression", "empty", "text", "foreign zip", "missing"])
def test_verify_and_load_of_damaged_file_raises_checkpoint_error(tmp_path: Path, damage: str) -> None:
    path = save_checkpoint_file(tmp_path / "a.ckpt")
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[content.index(torch.arange(1000.0).numpy().tobytes()) + 77] ^= 1
        path.write_bytes(content)
    elif damage == "other compression":
        content[content.index(b"PK\x01\x02") + 10] = zipfile.ZIP_DEFLATED
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("hello")
    elif damage == "foreign zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "hello")
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        verify_and_load(path)


def test_load_of_pickled_objects_requires_weights_only_false(tmp_path: Path) -> None:
    torch.save({"path": io.BytesIO(b"x")}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="weights_only=False"):
        OpenedFile(tmp_path / "a.ckpt").load(None)
    assert OpenedFile(tmp_path / "a.ckpt").load(False)["path"].read() == b"x"
