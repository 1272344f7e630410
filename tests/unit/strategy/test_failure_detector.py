"""What a rank does whose store is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_osdp.backend.liveness import describe_process
from lightning_osdp.errors import OSDPError
from lightning_osdp.strategy import failure_detector, later_runs

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
    process.communicate(b"\n")
    later_runs.store_of_run(store, 1).set("process/0", describe_process())
    start = time.monotonic()
    with pytest.raises(OSDPError, match=r"the process of rank 1 has ended, .*start the script anew"):
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
