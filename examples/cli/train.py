"""Trains what the configuration says: ``python examples/cli/train.py fit --config examples/cli/fit.yaml``."""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(seed_everything_default=1, save_config_kwargs={"overwrite": True})
