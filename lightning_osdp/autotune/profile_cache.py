"""Measurements on disk: the keys that they are valid for, and the files that hold them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from lightning_osdp.autotune.profile import ClusterProfile, Profile
from lightning_osdp.autotune.ranks import RankGroup, current_cluster
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import FrozenModel, ModelProfile
from lightning_osdp.profiling.tracing.trace import TracedStep
from lightning_osdp.state.atomic_files import write_text

CACHE_VERSION = 14
"""Version of the cached measurements. Raise it when a field changes its name or meaning: older files are ignored."""

ProfileT = TypeVar("ProfileT", bound=ClusterProfile)
FrozenT = TypeVar("FrozenT", bound=FrozenModel)


@dataclass(frozen=True)
class ModelProfileCache:
    """Model profiles of training steps in a folder (``profile_store.ModelProfileStore``)."""

    folder: Path

    def contains(self, architecture_key: str) -> bool:
        """Return whether a step of a module with this ``profile_store.architecture_key`` is cached."""
        return next(self.folder.glob(f"step-{architecture_key}-*.json"), None) is not None

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
    """

    ranks: RankGroup
    profile_files: tuple[Path, ...] = ()
    cluster_file: Path | None = None

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
            return cls(ranks, tuple(folder / f"{key}.json" for key in offline))
        cluster = current_cluster(ranks)
        fields = _key_fields(ranks.device, cluster, constraints)
        key = cache_key(traced, ranks.device, cluster, constraints)
        return cls(ranks, (folder / f"{key}.json",), folder / f"ranks-{_hash(fields)}.json")

    @property
    def file(self) -> Path | None:
        """The file that the profile is written to; None if nothing is cached."""
        return self.profile_files[-1] if self.profile_files else None

    def load_profile(self) -> Profile | None:
        """Return the cached profile on every rank; None if there is none. Collective: every rank must call it."""
        return self._load(self.profile_files, Profile)

    def load_cluster_profile(self) -> ClusterProfile | None:
        """Return what was measured of the ranks for another model, on every rank. Collective."""
        return self._load([self.cluster_file] if self.cluster_file else [], ClusterProfile)

    def save_profile(self, profile: Profile) -> None:
        """Write the profile on the first rank."""
        if self.ranks.is_rank_zero and self.file is not None:
            write(self.file, profile.model_dump_json())

    def save_cluster_profile(self, cluster_profile: ClusterProfile) -> None:
        """Write what was measured of the ranks on the first rank."""
        if self.ranks.is_rank_zero and self.cluster_file is not None:
            write(self.cluster_file, cluster_profile.model_dump_json())

    def _load(self, files: Sequence[Path], kind: type[ProfileT]) -> ProfileT | None:
        stored = (read(file, kind) for file in files) if self.ranks.is_rank_zero else iter(())
        return self.ranks.broadcast_object(next((value for value in stored if value is not None), None))


def cache_folder(cache: str | Path | None) -> Path | None:
    """Return the folder that a user's ``cache`` argument means: the default one for None, no folder for ``""``."""
    if cache is None:
        return default_cache_folder()
    return Path(cache) if str(cache) else None


def default_cache_folder() -> Path:
    """Return ``$LIGHTNING_OSDP_CACHE`` if that is set, else a folder in the user's cache folder."""
    own = os.environ.get("LIGHTNING_OSDP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "lightning_osdp"


def cache_key(
    traced: TracedStep, device: torch.device, cluster: Cluster, constraints: SearchConstraints, offline: bool = False
) -> str:
    """Return a fingerprint of hardware, versions and model: measurements are valid for exactly these.

    Args:
        traced: the step of the model.
        device: the device that is measured.
        cluster: the cluster, whose number of ranks and backend count; its links do not.
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
    return {
        "host": platform.node(),
        "device": name,
        "ranks": [cluster.ranks, cluster.nodes, *cluster.devices_by_node],
        "threads": torch.get_num_threads(),
        "backend": cluster.backend,
        "torch": torch.__version__,
        "engine": constraints.capabilities.engine,
        "format": CACHE_VERSION,
    }


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def read(file: Path, kind: type[FrozenT]) -> FrozenT | None:
    """Return the value in ``file``; None if there is none, or if the file is damaged."""
    if not file.exists():
        return None
    try:
        return kind.model_validate_json(file.read_text())
    except ValidationError:
        warnings.warn(f"{file} is damaged and will be measured anew", OSDPWarning, stacklevel=2)
        return None


def write(file: Path, text: str) -> None:
    """Write ``text`` to ``file``, completely or not at all; warn if the disk does not allow it."""
    try:
        write_text(file, text, is_own=None)
    except OSError as error:
        warnings.warn(f"measurements can't be kept in {file.parent}: {error}", OSDPWarning, stacklevel=2)


def store_correction(file: Path, correction: Correction) -> None:
    """Store what a run has shown with the measurements that its plan was made from."""
    profile = read(file, Profile)
    if profile is not None:
        write(file, profile.model_copy(update={"correction": correction}).model_dump_json())
