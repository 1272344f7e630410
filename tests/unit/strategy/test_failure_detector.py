"""What a rank does whose store is gone."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_osdp.errors import OSDPError
from lightning_osdp.strategy import failure_detector

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
        failure_detector._check_reachable(store)
    finally:
        server.kill()
        server.communicate()
    monkeypatch.setattr(failure_detector, "_get_default_store", lambda: store)
    start = time.monotonic()
    with pytest.raises(OSDPError, match=r"the first rank has ended.* start the script anew"):
        failure_detector.FailureDetector(1, 2, timedelta(seconds=60))
    assert time.monotonic() - start < 10
