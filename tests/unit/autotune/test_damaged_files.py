"""Files that are damaged at random: an equal value, a warning and a new measurement, or an error of ours."""

from __future__ import annotations

import json
import os
import pwd
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_osdp.autotune import profile_cache
from lightning_osdp.autotune.profile import ClusterProfile, Profile
from lightning_osdp.errors import ConfigurationError, OSDPError, OSDPWarning
from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.model import LinearInBatch
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.whatif import hardware
from lightning_osdp.report import diff, explain
from lightning_osdp.strategy import arguments
from tests.support.models import some_cluster

LEAVES = (
    float("nan"), float("inf"), float("-inf"), -1, 0, 0.0, 1e308, 5e-324, 10**30, "x", None, True, [], {}, [[]],
)  # fmt: skip
SEEDS = range(60)


PLANS_V1 = sorted(
    (Path(__file__).parents[2] / "fixtures" / "plans_v1").glob("*.json"), key=lambda path: path.stat().st_size
)


def a_plan() -> ExecutionPlan:
    """A plan that was searched, with all that ``osdp explain`` looks at."""
    return arguments.read_plan(next(path for path in PLANS_V1 if "alternatives" in path.read_text()))  # type: ignore[return-value]


def a_profile() -> Profile:
    """Measurements of two operators."""
    line = LinearInBatch(fixed=1e-3, per_sample=1e-4)
    time = OperatorTime(forward=line, backward=line)
    compute = ComputeTimes(operators=(time, time), unattributed=time, optimizer_s_per_byte=1e-9)
    return Profile(link=some_cluster().link, compute=compute)


def use_plan(path: Path) -> str:
    """What ``osdp explain`` and ``osdp diff`` make of it."""
    plan = arguments.read_plan(path)
    assert plan is not None
    return plan.to_json() + explain.build_explanation(plan).to_text() + diff.build_difference(plan, plan).to_text()


def use_cluster(path: Path) -> str:
    """The times of its collectives."""
    cluster = arguments.read_cluster(path)
    assert cluster is not None
    return cluster.model_dump_json() + str([fit.time_s(1 << 20, cluster.ranks) for _, fit in cluster.link])


def use_hardware(path: Path) -> str:
    """Its cluster."""
    spec = hardware.load(path)
    return spec.model_dump_json() + hardware.build_cluster(spec).model_dump_json()


def use_cache(path: Path, kind: Any = Profile) -> str:
    """What a start reads of it; nothing is measured anew."""
    value = profile_cache.read(path, kind)
    if value is None:
        raise OSDPError("measured anew")
    return str(value.model_dump_json())


def cached_text(folder: Path, value: Any) -> str:
    """A file of the cache."""
    profile_cache.write(folder / "cached", value.model_dump_json())
    return (folder / "cached").read_text()


Use = Callable[[Path], str]


@pytest.fixture
def kinds(tmp_path: Path) -> dict[str, tuple[str, Use]]:
    """The text of a file of each kind, and what reads it."""
    profile = a_profile()
    links = ClusterProfile(link=profile.link)
    spec = hardware.load("h100-80gb-nvlink").model_dump_json()
    return {
        "plan": (a_plan().to_json(), use_plan),
        "cluster": (some_cluster().model_dump_json(), use_cluster),
        "hardware": (spec, use_hardware),
        "cached profile": (cached_text(tmp_path, profile), use_cache),
        "cached links": (cached_text(tmp_path, links), lambda path: use_cache(path, ClusterProfile)),
    }


KINDS = ("plan", "cluster", "hardware", "cached profile", "cached links")


def damage(text: str, random_: random.Random) -> bytes:
    """The content after one fault of a disk, an editor, or somebody who means well."""
    content = bytearray(text.encode())
    how = random_.randrange(6)
    if how == 0:
        return bytes(content[: random_.randrange(len(content))])
    if how == 1:
        content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
        return bytes(content)
    if how == 2:
        return bytes(random_.choice((b"", b"\x00" * 9, b"\xff\xfe\xfa", b"[" * 9999, b"null", b"{}", b"9" * 9999)))
    value = json.loads(text)
    owner, key = random_.choice(list(places_in(value)))
    if how == 3:
        del owner[key]
    elif how == 4 and isinstance(owner[key], list):
        owner[key] = [*owner[key], *owner[key]][: random_.randrange(2 * len(owner[key]) + 1)]
    else:
        owner[key] = random_.choice(LEAVES)
    return json.dumps(value).encode()


def places_in(value: Any) -> Any:
    """Each (container, key) within a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places_in(value[key])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_is_equal_measured_anew_or_an_error_of_ours(
    tmp_path: Path, kinds: dict[str, tuple[str, Use]], kind: str
) -> None:
    text, use = kinds[kind]
    path = tmp_path / "damaged.json"
    path.write_text(text)
    whole = use(path)
    outcomes = {"equal": 0, "other": 0, "error": 0}
    for seed in SEEDS:
        path.write_bytes(damage(text, random.Random(seed)))
        said = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outcomes["equal" if use(path) == whole else "other"] += 1
            except OSDPError as error:
                outcomes["error"] += 1
                said = f"{error} {[warning.message for warning in caught]}"
        if said:
            assert str(path) in said, seed
    assert outcomes["error"] > len(SEEDS) / 2
    if kind.startswith("cached"):
        assert not outcomes["other"]


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_cannot_be_read_is_measured_anew_or_an_error_of_ours(
    tmp_path: Path, kinds: dict[str, tuple[str, Use]], kind: str
) -> None:
    folder = tmp_path / "folder.json"
    folder.mkdir()
    use = kinds[kind][1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OSDPError, match=r"folder\.json|measured anew"):
            use(folder)


@pytest.mark.parametrize("what", ["pipe", "circle of links", "name that no file can have", "long name"])
def test_cached_file_that_is_no_file_is_measured_anew_and_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / {"name that no file can have": "a\0b", "long name": "a" * 300}.get(what, "cached")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "circle of links":
        path.symlink_to(path)
    with pytest.warns(OSDPWarning, match="will be measured anew"):
        assert profile_cache.read(path, Profile) is None
    if what == "circle of links":
        profile_cache.write(path, a_profile().model_dump_json())
        assert profile_cache.read(path, Profile) == a_profile()
        return
    with pytest.warns(OSDPWarning, match="can.t be kept"):
        profile_cache.write(path, "{}")


def test_error_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(some_cluster().model_dump_json().replace('"latency_s":', '"latency_s":NaN,"x":', 1))
    with pytest.raises(ConfigurationError, match=r"cluster.json is not a cluster file: field link\..*latency_s is nan"):
        arguments.read_cluster(path)
    plan = json.loads(a_plan().to_json())
    plan["cluster"]["devices_per_node"] = 0
    path.write_text(json.dumps(plan))
    with pytest.raises(ConfigurationError, match=r"damaged: field cluster.devices_per_node: Input should be greater"):
        arguments.read_plan(path)


def test_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked.json"
    blocked.mkdir()
    with pytest.warns(OSDPWarning, match="can't be kept"):
        profile_cache.write(blocked, "{}")
    assert list(tmp_path.iterdir()) == [blocked]


def test_process_without_home_folder_caches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIGHTNING_OSDP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # KeyError: a container's user without an entry
    with pytest.warns(OSDPWarning, match="set HOME or LIGHTNING_OSDP_CACHE"):
        assert profile_cache.cache_folder(None) is None
