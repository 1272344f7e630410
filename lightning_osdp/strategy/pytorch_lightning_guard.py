"""Refuse Trainers of the separate package ``pytorch_lightning``, whose classes don't know those of ``lightning``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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


class _RegisterOnImport(MetaPathFinder):
    """Registers the error when ``pytorch_lightning`` is imported later."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "pytorch_lightning":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register an error with ``pytorch_lightning``, now or when it is imported, that says what to use instead."""
    package = sys.modules.get("pytorch_lightning")
    if package is None:
        sys.meta_path.insert(0, _RegisterOnImport())
    elif "osdp" not in package.strategies.StrategyRegistry:
        package.strategies.StrategyRegistry.register(
            "osdp", reject_foreign_trainer, description="of the package lightning alone"
        )
