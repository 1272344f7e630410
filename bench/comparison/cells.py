"""Cells of the comparison: model, setting and memory limit. The limits come from what the competitors take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.comparison.jobs import SETTINGS, Job, Setting
from bench.comparison.models import MODELS
from bench.comparison.records import Runs

MIB = 1 << 20
LEVELS = ("below", "tight", "middle", "plenty")
SHARES = {True: (-0.02, 0.08, 0.5, 1.05), False: (-0.06, 0.05, 0.35, 0.7)}
"""Where a limit lies between the least and the most (see ``limits``): if the model can be replicated, and if not. Below
the least, FairScale's FSDP does not train."""
REPLICATED_BATCH_SIZE = 8


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    model: str
    setting: str
    level: str
    memory_bytes: int

    @property
    def where(self) -> Setting:
        """The setting."""
        return SETTINGS[self.setting]

    @property
    def name(self) -> tuple[str, str, str]:
        """What the same cell has in another run, where its level may come to some bytes more or less."""
        return self.model, self.setting, str(self.memory_bytes) if self.level == "given" else self.level

    @property
    def place(self) -> tuple[int, int, float, int]:
        """By model as they are listed, then easy ones first."""
        return list(MODELS).index(self.model), self.where.ranks, _slowness(self.where), -self.memory_bytes

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.model}, {self.where.label}, {self.level} ({self.memory_bytes / MIB:.0f} MiB)"


def limits(runs: Runs, model: str, ranks: int, device: str) -> dict[str, int]:
    """Bytes of each level, without asking OSDP.

    The least is what FairScale's FSDP per operator takes at batch size 1, the most what DDP takes: at batch size 8
    where replicating is to be possible under the largest limit, else at batch size 1, which is then above all limits.
    Both are measured with the allocator setting, without a limit. Limits lie on the line between the two.
    """
    fits = MODELS[model].replicated_fits
    least = _peak(runs, model, ranks, "fairscale-op", 1, device)
    most = _peak(runs, model, ranks, "ddp", REPLICATED_BATCH_SIZE if fits else 1, device)
    return {
        level: int(least + share * (most - least)) // MIB * MIB
        for level, share in zip(LEVELS, SHARES[fits], strict=True)
    }


def _peak(runs: Runs, model: str, ranks: int, base: str, batch_size: int, device: str) -> int:
    """The less of two runs: whoever reads a library's pages first is charged for them, up to 30 MiB."""
    system = f"{base}+alloc"
    job = Job("measure", model, f"{ranks}-loopback", system, (batch_size,), warm_up=2, steps=1, device=device)
    results = [runs.get(replace(job, repeat=repeat)) for repeat in range(2)]
    for result in results:
        if result["outcome"] != "ok":
            raise SystemExit(f"{system} can't train {model} on {ranks} ranks without a limit: {result['error']}")
    return min(int(result["peak_bytes"]) for result in results)


def cells(
    runs: Runs, models: tuple[str, ...], settings: tuple[str, ...], levels: tuple[str, ...], device: str
) -> list[Cell]:
    """All cells, easy ones first: what a system can't do there, it can't do in harder ones. ``levels`` are of
    ``LEVELS``, or MiB."""
    found = []
    for model in models:
        bytes_of = {
            ranks: {level: int(level) * MIB for level in levels if level.isdigit()}
            | (limits(runs, model, ranks, device) if set(levels) & set(LEVELS) else {})
            for ranks in {SETTINGS[s].ranks for s in settings}
        }
        for setting in sorted(settings, key=lambda s: (SETTINGS[s].ranks, _slowness(SETTINGS[s]))):
            there = bytes_of[SETTINGS[setting].ranks]
            for level in sorted(levels, key=there.__getitem__, reverse=True):
                found.append(Cell(model, setting, "given" if level.isdigit() else level, there[level]))
    return found


def is_easier(one: Cell, other: Cell) -> bool:
    """Whether whatever is possible in ``other_bytes`` is possible in ``one``, and as fast."""
    return (
        one.model == other.model
        and (one.where.ranks == other.where.ranks)
        and one.memory_bytes >= other.memory_bytes
        and _slowness(one.where) <= _slowness(other.where)
    )


def _slowness(setting: Setting) -> float:
    return 1 / float(setting.rate.removesuffix("gbit")) if setting.rate else 0.0
