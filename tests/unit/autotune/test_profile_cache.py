"""Measurements on disk."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lightning_osdp.autotune import profile_cache
from lightning_osdp.autotune.profile import Profile
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.cost.trial_correction import Trial
from lightning_osdp.planning.search.plan_selection import CachedPlan
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime
from tests.support.models import hand_made_plan, some_cluster


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
    with pytest.warns(OSDPWarning, match=r"kept\.json is damaged and will be measured anew: "):
        assert profile_cache.read(file, Profile) is None
    file.unlink()
    file.mkdir()
    with pytest.warns(OSDPWarning, match=r"kept\.json can't be read and will be measured anew: "):
        assert profile_cache.read(file, Profile) is None


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "none"])
def test_cache_in_folder_that_cannot_be_holds_no_step(name: str, tmp_path: Path) -> None:
    assert not profile_cache.ModelProfileCache(tmp_path / name).contains("key")


@pytest.mark.parametrize("tries_anew", [False, True])
def test_store_correction_drops_plans_and_trials_where_they_have_to_be_tried_anew(
    tries_anew: bool, tmp_path: Path
) -> None:
    plan = hand_made_plan({"one": Mode.DP}, 2)
    trial = Trial(plan_key="", predicted_s=1.0, measured_s=1.0, overhead_by_kind_s={}, plan=plan)
    cached = CachedPlan(request_key="", plan=plan)
    times = ComputeTimes(operators=(), unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    whole = Profile(link=some_cluster().link, compute=times, trials=(trial,), cached_plans=(cached,))
    file = tmp_path / "kept.json"
    profile_cache.write(file, whole.model_dump_json())
    profile_cache.store_correction(file, Correction(compute=2.0), tries_anew)
    found = profile_cache.read(file, Profile)
    assert found is not None
    assert found.correction == Correction(compute=2.0)
    assert (found.trials, found.cached_plans) == (((), ()) if tries_anew else ((trial,), (cached,)))


def test_store_correction_drops_measurements_that_a_run_contradicts(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    for _ in range(2):  # another process may have dropped them
        profile_cache.store_correction(file, None)
        assert not file.exists()
        file.write_text("{}")
    profile_cache.store_correction(tmp_path, None)  # a folder stays
    assert tmp_path.exists()


def test_correction_of_more_memory_than_there_is_is_measured_anew(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    times = ComputeTimes(operators=(), unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    files = profile_cache.ProfileCache(RankGroup.single(torch.device("cpu")), (file,))
    for extra_bytes, is_used in ((1 << 20, True), (-1 << 20, True), (10**18, False), (-(10**18), False)):
        kept = Profile(link=some_cluster().link, compute=times, correction=Correction(memory_bytes=extra_bytes))
        profile_cache.write(file, kept.model_dump_json())
        with nullcontext() if is_used else pytest.warns(OSDPWarning, match="its correction of memory is more than"):
            assert files.load_profile() == (kept if is_used else None)
