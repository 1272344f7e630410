"""A Trainer from pytorch_lightning, which knows nothing of strategies for lightning.pytorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_osdp import OSDPStrategy
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy import pytorch_lightning_guard

SCRIPT = """
import {first}
import {second}
for strategy in ("osdp", lightning_osdp.OSDPStrategy()):
    try:
        pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1)
    except ValueError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("first", ["pytorch_lightning", "lightning_osdp"])
def test_pytorch_lightning_trainer_error_names_right_package(first: str) -> None:
    (second,) = {"pytorch_lightning", "lightning_osdp"} - {first}
    script = SCRIPT.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    by_name, by_instance = done.stdout.splitlines()[-2:]
    assert by_name.startswith('ConfigurationError strategy="osdp" is one of the package lightning')
    assert "<OSDPStrategy for lightning.pytorch.Trainer>" in by_instance


def test_reject_foreign_trainer_says_what_to_import() -> None:
    with pytest.raises(ConfigurationError, match=r"import lightning\.pytorch as pl"):
        pytorch_lightning_guard.reject_foreign_trainer()
    assert repr(OSDPStrategy()) == "<OSDPStrategy for lightning.pytorch.Trainer>"
