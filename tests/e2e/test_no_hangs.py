"""Where one rank fails, all ranks end soon, say the real cause, and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.support import failing
from tests.support.ranks import start_scripts

ROOT = Path(__file__).parents[2]
BOUND_S = 10.0
"""Seconds from the fault of one rank until both have ended."""

LIMIT_S = 240.0
"""For a run: it takes seconds, a hang would take the process group's 30 minutes."""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def command(how: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.support.failing", how, str(folder)]


def run_ranks_as_scripts(how: str, folder: Path, ranks: int = 2) -> list[tuple[int, str, float]]:
    """Runs ranks as torchrun starts them.

    Returns:
        Exit status and output of each, and the seconds from the fault until then; 0 if the moment is not known.
    """
    logs = [folder / f"err-{rank}" for rank in range(ranks)]
    processes = start_scripts(failing.main, ranks, (how, str(folder)), logs)
    ended_s = [0.0] * ranks
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all(ended_s) and time.monotonic() < deadline:
            wait([process.sentinel for process, ended in zip(processes, ended_s, strict=True) if not ended], 1.0)
            for rank, process in enumerate(processes):
                ended_s[rank] = ended_s[rank] or (0.0 if process.is_alive() else time.time())
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert None not in codes, f"not ended after {LIMIT_S:g} s"
    deadline = max(ended_s) + BOUND_S
    while time.time() < deadline and any(live_processes_in_session(process.pid) for process in processes):
        time.sleep(0.05)  # a worker of a DataLoader looks after its parent every five seconds
    assert not [process.pid for process in processes if live_processes_in_session(process.pid)]
    fault = folder / "fault"
    began_s = [fault.stat().st_mtime] * ranks if fault.exists() else ended_s
    seconds = [ended - began for ended, began in zip(ended_s, began_s, strict=True)]
    return [(code, log.read_text(), each) for code, log, each in zip(codes, logs, seconds, strict=True)]


def live_processes_in_session(session: int) -> list[int]:
    """Processes of a session that are alive, such as a dataloader's workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("how", "failed", "cause", "told"),
    [
        ("raise on 1", 1, "ValueError: the third step is unlucky", "rank 1 failed: ValueError: the third step is"),
        ("raise on 0", 0, "ValueError: the third step is unlucky", "rank 0 "),
        ("exit on 0", 0, "", "rank 0 failed: SystemExit: 3"),
        ("Ctrl-C on 1", 1, "", "rank 1 failed: KeyboardInterrupt"),
        ("kill 1", 1, "", "rank 1 ended without an error: it was killed"),
        ("worker 1", 1, "row 12 is unreadable", "OSError: row 12 is unreadable"),
        ("worker 0", 0, "row 12 is unreadable", "OSError: row 12 is unreadable"),
        ("stream, kill 0", 0, "", "rank 0"),
        ("stream, kill 1", 1, "", "rank 1 ended without an error: it was killed"),
        ("raise on 1, and in on_exception", 1, "nobody expects this", "rank 1 failed: ValueError: the third step is"),
        ("raise on 0, and in on_exception", 0, "nobody expects this", "rank 0 failed: ValueError: the third step is"),
        ("checkpoint, raise on 0", 0, "ValueError: the third step is unlucky", "rank 0 failed: ValueError: the third"),
        ("checkpoint, raise on 1", 1, "ValueError: the third step is unlucky", "rank 1 failed: ValueError: the third"),
        ("stream", 1, "ran out after 6 batches", "rank 1 failed: ConfigurationError: uneven data"),
        ("uneven", 1, "number of training batches differs", "number of training batches differs between ranks: 16 on"),
        (
            "uneven validation",
            1,
            "number of validation batches differs",
            "number of validation batches differs between",
        ),
        ("plan", 1, "the plan differs between ranks", "the plan differs between ranks"),
        ("two SIGTERMs to 1", 1, "", "rank 1 was told to stop (SIGTERM)"),
        ("SIGTERM to 0 in validate", 0, "", "rank 0 was told to stop (SIGTERM)"),
        ("SIGTERM to 1 in validate", 1, "", "rank 1 was told to stop (SIGTERM)"),
        ("swallow on 1", 1, None, "rank 0 is ended: rank 1 failed: ValueError: nobody ends this process"),
    ],
)
def test_failure_on_one_rank_ends_all_ranks_with_its_cause(
    tmp_path: Path, how: str, failed: int, cause: str | None, told: str
) -> None:
    for rank, (code, text, seconds) in enumerate(run_ranks_as_scripts(how, tmp_path)):
        if rank == failed and cause is None:
            assert code == 0, text  # it catches its error and goes on
            continue
        assert seconds < BOUND_S
        if rank == failed and "SIGTERM" in how:
            assert code == 0, text  # Lightning's SIGTERMException
            continue
        assert code != 0, text
        assert (cause if rank == failed else told) in text


def test_ctrl_c_ends_single_rank_with_status_1(tmp_path: Path) -> None:
    ((status, text, seconds),) = run_ranks_as_scripts("Ctrl-C on 0", tmp_path, ranks=1)
    assert status == 1
    assert "Detected KeyboardInterrupt" in text
    assert seconds < BOUND_S


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    """In ranks that Lightning starts: the terminal sends the signal to all of them."""
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            command("interrupt", tmp_path), env=environment(), cwd=ROOT, stdout=err, stderr=err, start_new_session=True
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all((tmp_path / f"step-3-of-rank-{rank}").exists() for rank in range(2)):
            assert process.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT_S) == 1
        while live_processes_in_session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not live_processes_in_session(process.pid)
    finally:
        for pid in live_processes_in_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert "Detected KeyboardInterrupt" in (tmp_path / "err").read_text()
