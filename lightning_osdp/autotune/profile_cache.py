"""Measurements on disk: the keys that they are valid for, and the files that hold them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import torch

from lightning_osdp.autotune.profile import ClusterProfile, MeasuredCluster, Profile
from lightning_osdp.autotune.ranks import NO_LINK, RankGroup, current_cluster, described_links
from lightning_osdp.backend.emulated import BACKEND as EMULATED
from lightning_osdp.backend.memory import total_bytes
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.files import describe_error
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.profiling.tracing.trace import TracedStep
from lightning_osdp.state.atomic_files import write_text

CACHE_VERSION = 16
"""Version of the cached measurements. Raise it when a field changes its name or meaning: older files are ignored."""

_CHECKSUM = re.compile(r',\s*"checksum":\s*"([0-9a-f]{64})"\s*}\s*$')

log = logging.getLogger(__name__)

FrozenT = TypeVar("FrozenT", bound=FrozenModel)


@dataclass(frozen=True)
class ModelProfileCache:
    """Model profiles of training steps in a folder (``profile_store.ModelProfileStore``)."""

    folder: Path

    def contains(self, architecture_key: str) -> bool:
        """Return whether a step of a module with this ``profile_store.architecture_key`` is cached."""
        with suppress(OSError, ValueError):  # of a name that no folder can have
            return next(self.folder.glob(f"step-{architecture_key}-*.json"), None) is not None
        return False

    def load(self, key: str) -> ModelProfile | None:
        """Return the cached profile; None if there is none."""
        return read(self._file(key), ModelProfile)

    def save(self, key: str, model_profile: ModelProfile) -> None:
        """Write the profile. Every rank writes the same one: they may be on machines that share no folder."""
        write(self._file(key), model_profile.model_dump_json())

    def _file(self, key: str) -> Path:
        return self.folder / f"step-{key}.json"


@dataclass(frozen=True)
class ProfileCache:
    """The files that hold the measurements of one model on the ranks of one run.

    Attributes:
        ranks: the ranks. The first one reads and writes.
        profile_files: files of the profile, the preferred one first. The last one is written.
        cluster_file: file of what is measured of the ranks for every model.
        model: the model; measurements of another one are damaged.
    """

    ranks: RankGroup
    profile_files: tuple[Path, ...] = ()
    cluster_file: Path | None = None
    model: ModelProfile | None = None

    @classmethod
    def open(
        cls,
        folder: Path | None,
        ranks: RankGroup,
        traced: TracedStep,
        cluster: Cluster | None,
        constraints: SearchConstraints,
    ) -> ProfileCache:
        """Return the files of a run in ``folder``; none if that is None.

        A single process that plans for several ranks prefers what such ranks have measured together on this machine.
        """
        if folder is None:
            return cls(ranks)
        if ranks.is_offline and cluster is not None:
            offline = (cache_key(traced, ranks.device, cluster, constraints, offline) for offline in (False, True))
            return cls(ranks, tuple(folder / f"{key}.json" for key in offline), model=traced.model_profile)
        known = described_links(ranks) if ranks.is_emulated else ClusterProfile(link=NO_LINK)
        cluster = current_cluster(ranks, known.link, known.hierarchical_links)
        fields = _key_fields(ranks.device, cluster, constraints)
        key = cache_key(traced, ranks.device, cluster, constraints)
        return cls(ranks, (folder / f"{key}.json",), folder / f"ranks-{_hash(fields)}.json", traced.model_profile)

    @property
    def file(self) -> Path | None:
        """The file that the profile is written to; None if nothing is cached."""
        return self.profile_files[-1] if self.profile_files else None

    def load_profile(self) -> Profile | None:
        """Return the cached profile on every rank; None if there is none. Collective: every rank must call it."""

        def check(profile: Profile) -> None:
            if not profile.matches(self.model):
                raise ValueError("it is of another model")
            if abs(profile.correction.memory_bytes) > total_bytes(self.ranks.device):
                raise ValueError("its correction of memory is more than there is")

        return self._load(self.profile_files, Profile, check)

    def load_cluster(self) -> MeasuredCluster | None:
        """Return what starts of any model have measured of the ranks, on every rank. Collective."""
        return self._load([self.cluster_file] if self.cluster_file else [], MeasuredCluster)

    def save_profile(self, profile: Profile) -> None:
        """Write the profile on the first rank."""
        if self.ranks.is_rank_zero and self.file is not None:
            write(self.file, profile.model_dump_json())

    def save_cluster(self, measured: MeasuredCluster) -> None:
        """Write what was measured of the ranks on the first rank."""
        if self.ranks.is_rank_zero and self.cluster_file is not None:
            write(self.cluster_file, measured.model_dump_json())

    def _load(
        self, files: Sequence[Path], kind: type[FrozenT], check: Callable[[FrozenT], object] = bool
    ) -> FrozenT | None:
        def load_first() -> FrozenT | None:
            stored = (read(file, kind, check) for file in files) if self.ranks.is_rank_zero else iter(())
            return next((value for value in stored if value is not None), None)

        return self.ranks.broadcast_object(self.ranks.raise_on_all_ranks(load_first))


def cache_folder(cache: str | Path | None) -> Path | None:
    """Return the folder that a user's ``cache`` argument means: the default one for None, no folder for ``""``."""
    if cache is None:
        return default_cache_folder()
    return Path(cache) if str(cache) else None


def default_cache_folder() -> Path | None:
    """Return ``$LIGHTNING_OSDP_CACHE`` if that is set, else a folder in the user's cache folder.

    None, with a warning, if the user has no home folder, as in containers whose user has no entry.
    """
    if own := os.environ.get("LIGHTNING_OSDP_CACHE"):
        return Path(own)
    with suppress(RuntimeError):  # where there is no home folder
        folder = platformdirs.user_cache_path("lightning_osdp", appauthor=False)
        if folder.is_absolute():
            return folder
    text = "nothing measured is kept for later starts: there is no home folder, so set HOME or LIGHTNING_OSDP_CACHE"
    warnings.warn(text, OSDPWarning, stacklevel=2)
    return None


def cache_key(
    traced: TracedStep, device: torch.device, cluster: Cluster, constraints: SearchConstraints, offline: bool = False
) -> str:
    """Return a fingerprint of hardware, versions and model: measurements are valid for exactly these.

    Args:
        traced: the step of the model.
        device: the device that is measured.
        cluster: the cluster, whose number of ranks and backend count; its links do if they are emulated.
        constraints: the constraints, which say how many slices are measured, and of which engine.
        offline: whether a single process measures, while no other rank uses the machine.
    """
    fields = _key_fields(device, cluster, constraints) | {
        "model": traced.model_profile.fingerprint,
        "step": traced.model_profile.model_dump_json(exclude={"evaluation"}),  # evaluation is not measured
        "slices": str(constraints.slice_granularity),
    }
    if offline:
        fields["offline"] = True
    return _hash(fields)


def _key_fields(device: torch.device, cluster: Cluster, constraints: SearchConstraints) -> dict[str, Any]:
    """Return what all measurements depend on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    fields: dict[str, Any] = {
        "host": platform.node(),
        "device": name,
        "ranks": [cluster.ranks, cluster.nodes, *cluster.devices_by_node],
        "threads": torch.get_num_threads(),
        "backend": cluster.backend,
        "torch": torch.__version__,
        "engine": constraints.capabilities.engine,
        "format": CACHE_VERSION,
    }
    if cluster.backend == EMULATED:  # whose links are described, and may be others at each start
        fields["links"] = cluster.model_dump_json(include={"link", "hierarchical_links"})
    return fields


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def read(file: Path, kind: type[FrozenT], check: Callable[[FrozenT], object] = bool) -> FrozenT | None:
    """Return the value in ``file``; None if there is none, or with a warning if the file is damaged or unreadable.

    Args:
        file: a file that ``write`` has written.
        kind: the type of the value.
        check: raises a ValueError, which says why, if the value can't be used here.
    """
    try:
        _refuse_special(file)
        text = file.read_text(encoding="utf-8")
        if (checksum := _CHECKSUM.search(text)) is not None:
            text = text[: checksum.start()] + "}"
            if _sha256(text) != checksum[1]:
                raise ValueError("its checksum is wrong")
        value = kind.model_validate_json(text)
        check(value)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warnings.warn(f"{file} can't be read and will be measured anew: {error}", OSDPWarning, stacklevel=2)
    except ValueError as error:
        text = f"{file} is damaged and will be measured anew: {describe_error(error)}"
        warnings.warn(text, OSDPWarning, stacklevel=2)
    else:
        return value
    return None


def write(file: Path, text: str) -> None:
    """Write a JSON object to ``file``, completely or not at all, with its checksum; warn if the disk refuses."""
    try:
        _refuse_special(file)
        write_text(file, f'{text[:-1]},"checksum":"{_sha256(text)}"}}', is_own=None)
    except (OSError, ValueError) as error:  # the latter for names that no file can have
        warnings.warn(f"measurements can't be kept in {file.parent}: {error}", OSDPWarning, stacklevel=2)


def _refuse_special(file: Path) -> None:
    """Raise where there is a pipe, which would wait for its other end, a device or a folder."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is not an ordinary file")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def store_correction(file: Path, correction: Correction | None, tries_anew: bool = False) -> None:
    """Store what a run has shown with the measurements that its plan was made from.

    Args:
        file: the file of the measurements.
        correction: the correction; None if the run contradicts the measurements, which are dropped then.
        tries_anew: whether plans and trials are dropped, so that the next start tries plans again.
    """
    if correction is None:
        with suppress(OSError):
            file.unlink()
        log.info("the step is much shorter than predicted: the next start measures anew what was in %s", file)
        return
    profile = read(file, Profile)
    if profile is not None:
        dropped = {"cached_plans": (), "trials": ()} if tries_anew else {}
        write(file, profile.model_copy(update={"correction": correction, **dropped}).model_dump_json())
