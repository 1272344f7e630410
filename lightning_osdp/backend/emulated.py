"""Tell process groups whose other ranks are not there (package ``emulation``) from real ones."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning_osdp.planning.spec.cluster import Cluster

BACKEND = "emulated"
"""Name of the backend, in ``torch.distributed`` and in a ``Cluster``."""


def is_emulated(group: Any) -> bool:
    """Return whether the other ranks of ``group`` are not there: they do and have what this one does and has."""
    return getattr(group, "is_emulated", False)


def described_cluster(group: Any) -> Cluster:
    """Return the cluster that an emulated ``group`` stands for."""
    cluster: Cluster = group.cluster
    return cluster


def without_link_time(group: Any) -> AbstractContextManager[None]:
    """Let collectives of an emulated ``group`` take no longer than their copies within a context."""
    pause: AbstractContextManager[None] = group.without_link_time()
    return pause
