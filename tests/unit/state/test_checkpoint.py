"""Saving takes no more memory than the largest operator, and fails on all ranks or none."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_osdp.backend.cpu.malloc import configure_cpu_allocator
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import OSDPError
from lightning_osdp.state import atomic_files
from lightning_osdp.state.checkpoint import CheckpointFormat, consolidate
from lightning_osdp.state.shard_layout import TensorChunk
from tests.support.models import hand_made_plan, modes_for
from tests.support.ranks import run_ranks

WIDTH, LAYERS = 1024, 8
LARGEST = 4 * WIDTH * WIDTH
SAVES = 6
SLACK = 6 << 20
"""Of the allocator, of buffers, and of modules that are imported while saving: a sixteenth of what is saved."""


def process_status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def peak_growth_bytes(work: Callable[[], None]) -> int:
    """By how much the process's resident memory rose at the most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = process_status_bytes("VmRSS")
    work()
    return process_status_bytes("VmHWM") - before


@contextmanager
def limited_file_size(is_full: bool) -> Any:
    """Files can't grow beyond a mebibyte: writing fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_and_measure(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    configure_cpu_allocator()
    torch.manual_seed(1)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.Adam(module.parameters())
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(module, hand_made_plan(modes_for(module, "zdp"), ranks), [optimizer])
    module(torch.rand(2, WIDTH)).sum().backward()
    engine.before_optimizer_step(optimizer)
    optimizer.step()
    engine.after_optimizer_step()
    optimizer.zero_grad()

    def save(kind: str, path: Path) -> None:
        checkpoints = CheckpointFormat(kind)
        with checkpoints.deferred_gathers(rank == 0, False):
            state = {
                "state_dict": engine.model_state(checkpoints.deferred_tensors),
                "optimizer_states": [engine.optimizer_state(optimizer, 0, checkpoints.deferred_tensors)],
            }
            checkpoints.save(state, path, dist.group.WORLD)

    found: dict[str, Any] = {}
    for kind in ("full", "sharded"):
        path = Path(folder, kind, "last.ckpt")
        save(kind, path)  # once before it is measured, so that everything is imported
        found[kind] = peak_growth_bytes(lambda kind=kind, path=path: save(kind, path))  # type: ignore[misc]
        try:
            with limited_file_size(rank == (0 if kind == "full" else 1)):
                save(kind, path)
        except OSDPError as error:
            found[f"{kind} on a full disk"] = str(error)
        found[f"{kind} beside"] = [entry.name for entry in path.parent.iterdir()]
        found[f"{kind} still loads"] = len(CheckpointFormat(kind).load(path, True, dist.group.WORLD)["state_dict"])
    if rank == 0:
        source, target = Path(folder, "sharded", "last.ckpt"), Path(folder, "whole.ckpt")
        found["consolidate"] = peak_growth_bytes(lambda: consolidate(source, target))
    found["state"] = engine.model_state()
    for fault in FAULTS:
        for victim in range(ranks):
            kind, inject = FAULTS[fault]
            path = Path(folder, kind, "last.ckpt")
            before, began = digest(path), time.monotonic()
            dist.barrier()
            try:
                with inject() if rank == victim else nullcontext():
                    save(kind, path)
                message = "saved"
            except OSDPError as error:
                message = f"{type(error).__name__}: {error}"
            found[fault, victim] = message, time.monotonic() - began
            dist.barrier()  # the group can still be used
            found[fault, victim, "is earlier one"] = digest(path) == before
            found[fault, victim, "beside"] = [entry.name for entry in path.parent.iterdir()]
            dist.barrier()
    found["as hosts"] = {kind: save_as_own_host(rank, ranks, Path(folder), kind) for kind in ("full", "sharded")}
    for kind in ("full", "sharded"):
        save(kind, Path(folder, kind, "last.ckpt"))
    state = engine.model_state()
    found["unchanged"] = all(torch.equal(state[key], value) for key, value in found["state"].items())
    return found


def save_as_own_host(rank: int, ranks: int, folder: Path, kind: str) -> dict[str, Any]:
    """Save as one of several runs on hosts of their own, all to the same paths; with an exchange of paths or without.

    Returns:
        What lies there in the end, and whether each file is of one save.
    """
    group = [dist.new_group([each]) for each in range(ranks)][rank]
    own_host = replaced(atomic_files, "_host", lambda: f"host-{rank}")
    no_exchange = replaced(atomic_files, "_exchange", lambda *_: False)
    found: dict[str, Any] = {}
    for name, exchange in (("exchanged", nullcontext()), ("in two steps", no_exchange)):
        place = folder / f"hosts {name} {kind}"
        with own_host, exchange:
            for number in range(SAVES):
                state = {"state_dict": {str(i): torch.full((100,), float(number + 1000 * rank)) for i in range(3)}}
                for path in (place / "last.ckpt", place / f"own-{rank}.ckpt"):
                    CheckpointFormat(kind).save(state, path, group)
        dist.barrier()
        values = CheckpointFormat(kind).load(place / "last.ckpt", True, group)["state_dict"]
        found[name] = sorted(path.name for path in place.iterdir()), len({float(x) for v in values.values() for x in v})
        dist.barrier()
        own_host = replaced(atomic_files, "_host", lambda: f"host-{rank}")
    return found


def digest(path: Path) -> str:
    """The content of a file, or of the files in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Any:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def no_memory_for_full_tensor() -> Any:
    new_empty = torch.Tensor.new_empty

    def refuse_large(self: torch.Tensor, *sizes: Any, **named: Any) -> torch.Tensor:
        found = new_empty(self, *sizes, **named)
        if found.numel() >= WIDTH * WIDTH:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return found

    return replaced(torch.Tensor, "new_empty", refuse_large)


def no_memory_for_chunk() -> Any:
    def refuse(self: TensorChunk, local_shard: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    return replaced(TensorChunk, "view", refuse)


@contextmanager
def read_only_place() -> Any:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    with replaced(Path, "mkdir", refuse), replaced(Path, "unlink", refuse), replaced(Path, "rmdir", refuse):
        yield


class FileOnFullDisk:
    """A file that finds out that the disk is full when it is written to, or not before it is closed (NFS)."""

    def __init__(self, file: Any, moment: str) -> None:
        self._file, self._moment, self._size = file, moment, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FileOnFullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: Any) -> int:
        self._size += len(data)
        if self._moment == "write" and self._size > 1 << 16:
            raise no_space()
        return int(self._file.write(data))

    def close(self) -> None:
        self._file.close()
        if self._moment == "close":
            raise no_space()


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def full_disk(moment: str) -> Callable[[], Any]:
    """At the first moment of this kind in a save."""

    def refuse(*_: Any) -> None:
        raise no_space()

    def open_file(self: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        file = original(self, mode, *args, **named)
        return FileOnFullDisk(file, moment) if "w" in mode else file

    original = Path.open
    return lambda: replaced(os, "fsync", refuse) if moment == "fsync" else replaced(Path, "open", open_file)


FAULTS = {
    "no memory for a full tensor": ("full", no_memory_for_full_tensor),
    "no memory for a chunk": ("sharded", no_memory_for_chunk),
    **{f"read-only place, {kind}": (kind, read_only_place) for kind in ("full", "sharded")},
    **{
        f"full disk at {moment}, {kind}": (kind, full_disk(moment))
        for moment in ("write", "fsync", "close")
        for kind in ("full", "sharded")
    },
}
"""Format, and what goes wrong on one rank while it is saved."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(save_and_measure, 2, str(folder))


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("victim", [0, 1])
def test_fault_of_one_rank_while_saving_raises_on_all_ranks_within_seconds(
    results: list[dict[str, Any]], fault: str, victim: int
) -> None:
    for result in results:
        message, seconds = result[fault, victim]
        assert seconds < 10
        assert fault.startswith("read-only") or result[fault, victim, "beside"] == ["last.ckpt"]
        if not fault.startswith("no memory") and fault.endswith("full") and victim:
            assert message == "saved"  # the first rank writes the file
            continue
        assert message.startswith("CheckpointError: ")
        causes = {"read-only place": "Read-only file system", "full disk": "No space left on device"}
        assert next((text for start, text in causes.items() if fault.startswith(start)), "allocate memory") in message
        assert not fault.startswith("no memory") or f"rank {victim}" in message
        assert result[fault, victim, "is earlier one"]
    assert results[0]["unchanged"]


def test_save_needs_no_more_memory_than_largest_operator(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["full"] < LARGEST + SLACK
        assert result["sharded"] < LARGEST + SLACK
    # A stored box, read into memory, beside the whole tensor that it is put into.
    assert results[0]["consolidate"] < 2 * LARGEST + SLACK


def test_saved_and_consolidated_files_hold_unsharded_state(results: list[dict[str, Any]], folder: Path) -> None:
    for name in ("full/last.ckpt", "whole.ckpt"):
        state = torch.load(folder / name, weights_only=True)["state_dict"]
        assert list(state) == list(results[0]["state"])
        assert all(torch.equal(value, results[0]["state"][key]) for key, value in state.items())


def test_save_on_full_disk_raises_on_all_ranks_and_keeps_old_checkpoint(results: list[dict[str, Any]]) -> None:
    for result in results:
        for kind in ("full", "sharded"):
            assert "can't be written" in result[f"{kind} on a full disk"]
            assert "File too large" in result[f"{kind} on a full disk"]
            assert result[f"{kind} beside"] == ["last.ckpt"]
            assert result[f"{kind} still loads"] == 2 * LAYERS


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_runs_on_two_hosts_that_save_to_the_same_paths_leave_whole_checkpoints(
    results: list[dict[str, Any]], kind: str
) -> None:
    for result in results:
        for names, num_values in result["as hosts"][kind].values():
            assert names == ["last.ckpt", "own-0.ckpt", "own-1.ckpt"]
            assert num_values == 1
