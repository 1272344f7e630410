"""Modules that are too large for this machine: a plan needs their shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.formatting import format_bytes


@dataclass
class ModuleMaker:
    """Makes a module from its class, without memory if it would take too much.

    Attributes:
        limit_bytes: the largest module that is made for real.
        is_for_planning: whether a larger one is made on the meta device; it is refused otherwise.
        is_on_meta: whether that was done.
    """

    limit_bytes: int
    is_for_planning: bool
    is_on_meta: bool = False

    def __call__(self, class_type: type[pl.LightningModule], *args: Any, **kwargs: Any) -> pl.LightningModule:
        """Make the module.

        Raises:
            ConfigurationError: it is too large to be trained here.
        """
        try:
            with torch.device("meta"):
                module = class_type(*args, **kwargs)
        except Exception:  # its own code needs values that are not there; what else is wrong is said below
            return class_type(*args, **kwargs)
        size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        if size <= self.limit_bytes:
            return class_type(*args, **kwargs)
        if not self.is_for_planning:
            raise ConfigurationError(
                f"{class_type.__name__} makes {format_bytes(size)} of parameters when it is built, this device has "
                f"{format_bytes(self.limit_bytes)}: build them in configure_model, where a rank makes its own shards "
                "only, or plan with --plan-only"
            )
        self.is_on_meta = True
        return module
