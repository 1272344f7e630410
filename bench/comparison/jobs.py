"""What one run is: a model, trained by a system, in a setting, under a limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench.comparison.systems import System, parse


@dataclass(frozen=True)
class Setting:
    """Ranks and what is between them."""

    nodes: int
    per_node: int
    rate: str | None = None
    """Of each node's link, as tc takes it; None: loopback, or whatever joins the GPUs."""

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.per_node

    @property
    def name(self) -> str:
        """``2-loopback``, ``4-1gbit``, ``2x2-1gbit``."""
        shape = f"{self.nodes}x{self.per_node}" if self.nodes > 1 and self.per_node > 1 else f"{self.ranks}"
        return f"{shape}-{self.rate or 'loopback'}"

    @property
    def label(self) -> str:
        """For people."""
        link = self.rate.replace("gbit", " Gbit/s") if self.rate else "loopback"
        hosts = f" on {self.nodes} hosts" if self.nodes > 1 and self.per_node > 1 else ""
        return f"{self.ranks} ranks{hosts}, {link}"


SETTINGS = {
    setting.name: setting
    for setting in (
        *(Setting(1, ranks) if rate is None else Setting(ranks, 1, rate)
          for ranks in (2, 4) for rate in (None, "2gbit", "1gbit")),
        Setting(2, 2, "1gbit"),
    )
}  # fmt: skip
FULL_SETTINGS = tuple(name for name in SETTINGS if "x" not in name)
QUICK_SETTINGS = {"cpu": ("2-1gbit",), "cuda": ("2-loopback",)}
"""By device: a slow link can be emulated between ranks on the CPU alone."""


@dataclass(frozen=True)
class Job:
    """One run. Two equal jobs need not both be run."""

    purpose: str
    """``measure`` (memory without a limit), ``search``, ``final``, ``verify`` or ``profile``."""
    model: str
    setting: str
    system: str
    sizes: tuple[int, ...]
    """Batch sizes per rank, one after the other in one process; empty: the system picks its own."""
    memory_bytes: int | None = None
    """Hard limit of each rank."""
    repeat: int = 0
    warm_up: int = 3
    """Steps that are not counted: optimizer states are made, caches and allocators fill up."""
    steps: int = 6
    """Steps of each batch size that are."""
    until_flat: bool = False
    """Whether to stop once two batch sizes gain nothing over those before."""
    budget_s: float = 60.0
    """No further batch size is begun once training has taken this long."""
    timeout_s: float = 240.0
    """The run is ended then, and counts as failed."""
    device: str = "cpu"

    @property
    def how(self) -> System:
        """The system."""
        return parse(self.system)

    @property
    def where(self) -> Setting:
        """The setting."""
        return SETTINGS[self.setting]

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """Batch sizes and how many batches of each. Sizes after the first need a single one to warm up."""
        return tuple((size, (1 if index else self.warm_up) + self.steps) for index, size in enumerate(self.sizes))

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from other jobs, as JSON has it."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
