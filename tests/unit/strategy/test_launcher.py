"""The launcher in a notebook, where a script can't be run again for each rank."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.launcher import Launcher


def test_launcher_in_notebook_allows_one_device() -> None:
    assert Launcher(LightningEnvironment(), num_processes=1, num_nodes=1).is_interactive_compatible


@pytest.mark.parametrize(("processes", "nodes"), [(2, 1), (1, 2)])
def test_launcher_in_notebook_refuses_several_devices_and_says_what_works(processes: int, nodes: int) -> None:
    with pytest.raises(ConfigurationError, match=r"use Trainer\(devices=1\) here, or put the code in a script"):
        _ = Launcher(LightningEnvironment(), num_processes=processes, num_nodes=nodes).is_interactive_compatible
