"""Counts what emulated ranks send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lightning_osdp.emulation.process_group import EmulatedGroup


@contextmanager
def count_sent() -> Iterator[Counter[str]]:
    """Count collectives of all groups within the context, and bytes of their whole tensors, also by kind."""
    found: Counter[str] = Counter()
    run = EmulatedGroup._run

    def counted(group: Any, kind: str, copy: Any, results: Any, num_bytes: Any = None, *rest: Any, **named: Any) -> Any:
        size = sum(result.nbytes for result in results) if num_bytes is None else num_bytes
        found.update({kind: size, "bytes": size, f"calls of {kind}": 1, "calls": 1})
        return run(group, kind, copy, results, num_bytes, *rest, **named)

    with patch.object(EmulatedGroup, "_run", counted):
        yield found
