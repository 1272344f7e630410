"""Why a module is not made whole after its run: the figures are those of one rank, the one that lacks most."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.backend.memory import MemoryLimit
from lightning_osdp.strategy import run_end

MIB = 1 << 20
LIMIT = MemoryLimit(torch.device("cpu"), 2, user_limit=MIB)


@pytest.mark.parametrize(
    ("needed_and_allowed", "expected"),
    [
        ([(90, 90), (120, 200)], None),
        ([(100, 90), (120, 200)], "it needs 100.0 MiB on a device, of which 90.0 MiB may be used"),
        ([(100, 90), (120, 100)], "it needs 120.0 MiB on a device, of which 100.0 MiB may be used"),
    ],
)
def test_reason_not_to_make_module_whole_has_needed_and_allowed_bytes_of_same_rank(
    needed_and_allowed: list[tuple[int, int]], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = [(needed * MIB, allowed * MIB) for needed, allowed in needed_and_allowed]
    monkeypatch.setattr(RankGroup, "all_gather_object", lambda *_: figures)
    engine: Any = SimpleNamespace(missing_bytes=lambda _: 0)
    assert run_end._why_not_whole(engine, (), LIMIT, None) == expected
