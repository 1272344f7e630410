"""Measurements on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_osdp.autotune import profile_cache
from lightning_osdp.autotune.profile import Profile
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime
from tests.support.models import some_cluster


def test_read_of_missing_or_damaged_cache_file_returns_none(tmp_path: Path) -> None:
    time = OperatorTime()
    whole = Profile(
        link=some_cluster().link, compute=ComputeTimes(operators=(), unattributed=time, optimizer_s_per_byte=0.0)
    )
    file = tmp_path / "kept.json"
    profile_cache.write(file, whole.model_dump_json())
    assert profile_cache.read(file, Profile) == whole
    assert profile_cache.read(tmp_path / "none.json", Profile) is None
    file.write_text(file.read_text()[:-5])
    with pytest.warns(OSDPWarning, match="damaged"):
        assert profile_cache.read(file, Profile) is None
