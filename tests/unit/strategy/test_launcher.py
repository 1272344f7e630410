"""The launcher in a notebook, where a script can't be run again for each rank."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy import launcher
from lightning_osdp.strategy.launcher import Launcher


def test_launcher_in_notebook_allows_one_device() -> None:
    assert Launcher(LightningEnvironment(), num_processes=1, num_nodes=1).is_interactive_compatible


@pytest.mark.parametrize(("processes", "nodes"), [(2, 1), (1, 2)])
def test_launcher_in_notebook_refuses_several_devices_and_says_what_works(processes: int, nodes: int) -> None:
    with pytest.raises(ConfigurationError, match=r"use Trainer\(devices=1\) here, or put the code in a script"):
        _ = Launcher(LightningEnvironment(), num_processes=processes, num_nodes=nodes).is_interactive_compatible


def test_first_rank_that_fails_before_ranks_are_connected_ends_those_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # other tests may have left it, and then no process is started
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    started = Launcher(LightningEnvironment(), num_processes=2, num_nodes=1)
    ended: list[int] = []
    monkeypatch.setattr(launcher, "end_process", ended.append)
    monkeypatch.setattr(launcher, "OBSERVER_INTERVAL_S", 0.05)
    monkeypatch.setattr(launcher, "OBSERVER_GRACE_S", 0.3)
    monkeypatch.setattr(launcher.dist, "is_initialized", lambda: False)  # whatever other tests have left
    monkeypatch.setattr(started, "_call_children_scripts", lambda: started.procs.append(child))

    def connect() -> None:
        raise OSError("the port is taken")

    with pytest.raises(OSError, match="the port is taken"):
        started.launch(connect)
    assert child.wait(10) == -9
    time.sleep(1)
    assert not ended, "its script may have caught the error"


@pytest.mark.parametrize("status", [0, 3])
def test_first_rank_is_ended_some_time_after_a_rank_that_it_has_started_fails(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(launcher, "end_process", ended.append)
    monkeypatch.setattr(launcher.failure_detector, "EXIT_STATUS", 1)  # the command `osdp` sets another
    monkeypatch.setattr(launcher, "OBSERVER_INTERVAL_S", 0.05)
    monkeypatch.setattr(launcher, "OBSERVER_GRACE_S", 0.3)
    child = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    child.wait()
    began_s = time.monotonic()
    assert launcher._RankObserver([child], None)._run()  # it need not look again
    said = "rank 0 is ended: rank 1 has ended with status 3\n" if status else ""
    assert (ended, capsys.readouterr().err) == ([1] if status else [], said)
    assert not status or time.monotonic() - began_s > 0.3  # it had time to say so itself
