"""Which look-ups of rows run under autocast: aten calls don't show it, since it is off where they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class LookUps:
    """Knows the type that autocast computes in while ``functional.embedding`` runs."""

    def __init__(self) -> None:
        self._dtype: torch.dtype | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Note what autocast is where rows are looked up, until the end of the block."""
        embedding = functional.embedding

        @wraps(embedding)
        def noted(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            before, device = self._dtype, weight.device.type
            is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
            self._dtype = torch.get_autocast_dtype(device) if is_on else None
            try:
                return embedding(input, weight, *args, **kwargs)
            finally:
                self._dtype = before

        functional.embedding = noted
        try:
            yield
        finally:
            functional.embedding = embedding

    def compute_dtype(self, func: Any, args: tuple[Any, ...]) -> torch.dtype | None:
        """Return autocast's type if an aten call is such a look-up under it, with a dense gradient."""
        is_dense = func is torch.ops.aten.embedding.default and not any(args[4:])
        return self._dtype if is_dense else None
