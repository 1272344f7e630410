"""What a rank does whose store is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_osdp.backend.liveness import describe_process
from lightning_osdp.errors import OSDPError
from lightning_osdp.strategy import error_text, failure_detector, later_runs
from tests.support.odd_errors import ODD_ERRORS

SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_later_run_without_the_first_rank_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, 2, False, timeout=timedelta(seconds=60), wait_for_workers=False)
        failure_detector.check_reachable(store)
    finally:
        server.kill()
        server.communicate()
    monkeypatch.setattr(failure_detector, "_get_default_store", lambda: store)
    start = time.monotonic()
    with pytest.raises(OSDPError, match=r"the first rank has ended.* start the script anew"):
        failure_detector.FailureDetector(1, 2, timedelta(seconds=60))
    assert time.monotonic() - start < 10


def test_later_run_without_another_rank_is_an_error_at_once() -> None:
    store = dist.HashStore()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    earlier = later_runs.store_of_run(store, 0)
    earlier.set("process/0", describe_process())
    earlier.set("process/1", describe_process().replace(str(os.getpid()), str(process.pid)))
    earlier.set("cause/1", "rank 1 failed: ValueError: row 7 is bad")
    process.communicate(b"\n")
    later_runs.store_of_run(store, 1).set("process/0", describe_process())
    start = time.monotonic()
    with pytest.raises(
        OSDPError,
        match=r"the process of rank 1 has ended, .*start the script anew. Its error: rank 1 failed: ValueError: row 7",
    ):
        later_runs.wait_for_ranks(store, 1, 2, 60.0)
    assert time.monotonic() - start < 10


def test_later_run_waits_for_a_rank_that_is_late() -> None:
    store = dist.HashStore()
    for rank in range(2):
        later_runs.store_of_run(store, 0).set(f"process/{rank}", describe_process())
    later_runs.store_of_run(store, 1).set("process/0", describe_process())
    late = threading.Timer(0.3, later_runs.store_of_run(store, 1).set, ("process/1", describe_process()))
    late.start()
    start = time.monotonic()
    later_runs.wait_for_ranks(store, 1, 2, 60.0)
    assert 0.2 < time.monotonic() - start < 10


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[failure_detector.FailureDetector]:
    """A detector of the only rank."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    monkeypatch.setattr(failure_detector, "_get_default_store", lambda: store)
    monkeypatch.setattr(failure_detector, "CAUSE_WAIT_S", 0.1)
    detector = failure_detector.FailureDetector(0, 1, timedelta(seconds=60))
    yield detector
    detector.stop()


@pytest.mark.parametrize("kind", list(ODD_ERRORS))
def test_report_of_any_error_is_published(detector: failure_detector.FailureDetector, kind: str) -> None:
    make, said = ODD_ERRORS[kind]
    error = make()
    detector.report_failure(error)
    published = detector._store.get("cause/0").decode()
    assert published.startswith(f"rank 0 failed: {said}")
    assert len(published) < 2 * error_text.MAX_TEXT
    assert failure_detector.detector_that_reported(error) is detector


def test_noted_failure_is_published_at_exit_unless_the_run_has_ended(
    detector: failure_detector.FailureDetector,
) -> None:
    detector.note_failure(ValueError("row 7 is bad"))
    detector.note_failure(ValueError("the callback raises as well"))
    assert detector._report_at_exit is not None
    detector._report_at_exit()
    assert detector._store.get("cause/0").decode() == "rank 0 failed: ValueError: row 7 is bad"


def test_noted_failure_is_dropped_when_the_run_ends(detector: failure_detector.FailureDetector) -> None:
    detector.note_failure(ValueError("row 7 is bad"))
    detector.stop()
    assert detector._report_at_exit is not None
    detector._report_at_exit()
    assert not detector._store.check(["cause/0"])


def test_process_group_is_destroyed_at_exit_without_starting_a_thread_then() -> None:
    """From Python 3.12 on, a thread that is started while the interpreter ends is an error."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "destroyed\n", "")


ENDING = """
import atexit, threading
from datetime import timedelta
import torch.distributed as dist
from lightning_osdp.strategy.failure_detector import FailureDetector

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: dist.is_initialized() or print("destroyed"))
FailureDetector(0, 1, timedelta(seconds=60)).stop()
atexit.register(lambda: setattr(threading.Thread, "start", refuse))
"""
