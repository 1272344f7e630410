"""Refuse Trainers of the separate package ``pytorch_lightning``, whose classes don't know those of ``lightning``."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning_osdp.errors import ConfigurationError


def reject_foreign_trainer(**_: Any) -> NoReturn:
    """Refuse ``strategy="osdp"`` for a Trainer of ``pytorch_lightning``.

    Raises:
        ConfigurationError: always; the message says which Trainer to use.
    """
    raise ConfigurationError(
        'strategy="osdp" is one of the package lightning, and this Trainer comes from pytorch_lightning: use Trainer '
        "and LightningModule of one package, `import lightning.pytorch as pl`"
    )


def register() -> None:
    """Register an error with ``pytorch_lightning``, if it was imported, that says what is wrong and what to use."""
    package = sys.modules.get("pytorch_lightning")
    if package is not None and "osdp" not in package.strategies.StrategyRegistry:
        package.strategies.StrategyRegistry.register(
            "osdp", reject_foreign_trainer, description="of the package lightning alone"
        )
