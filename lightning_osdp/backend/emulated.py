"""Tell process groups whose other ranks are not there (package ``emulation``) from real ones."""

from __future__ import annotations

from typing import Any

BACKEND = "emulated"
"""Name of the backend, in ``torch.distributed`` and in a ``Cluster``."""


def is_emulated(group: Any) -> bool:
    """Return whether the other ranks of ``group`` are not there: they do and have what this one does and has."""
    return getattr(group, "is_emulated", False)
