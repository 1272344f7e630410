"""The separate package ``pytorch_lightning``: the same classes once more, which don't know those of ``lightning``."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning_osdp.errors import ConfigurationError


def reject_foreign_trainer(**_: Any) -> NoReturn:
    """What a Trainer of that package gets for ``strategy="osdp"``.

    Raises:
        ConfigurationError: says which Trainer to use.
    """
    raise ConfigurationError(
        'strategy="osdp" is one of the package lightning, and this Trainer comes from pytorch_lightning: use Trainer '
        "and LightningModule of one package, `import lightning.pytorch as pl`"
    )


def register() -> None:
    """Has that package, if it was imported before, say what is wrong, instead of that it knows no such strategy."""
    package = sys.modules.get("pytorch_lightning")
    if package is not None and "osdp" not in package.strategies.StrategyRegistry:
        package.strategies.StrategyRegistry.register(
            "osdp", reject_foreign_trainer, description="of the package lightning alone"
        )
