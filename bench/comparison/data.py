"""Real text, the same for every system: the source of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

TEXT_BYTES = 4 << 20
CROPS = 1 << 16


class Text(Dataset[Tensor]):
    """``CROPS`` random pieces of ``tokens + 1`` bytes."""

    def __init__(self, tokens: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = tokens + 1
        generator = torch.Generator().manual_seed(1)
        self.starts = torch.randint(len(text) - self.length, (CROPS,), generator=generator)

    def __len__(self) -> int:
        return CROPS

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.bytes[start : start + self.length].long()


class Ladder(Sampler[list[int]]):
    """This rank's part of global batches whose size goes up: some batches of each size.

    Args:
        sizes: batch size per rank, and how many batches of it.
        rank: this rank.
        ranks: how many there are. All draw the same numbers, so a global batch does not depend on who trains on it.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], rank: int, ranks: int) -> None:
        self.sizes, self.rank, self.ranks = tuple(sizes), rank, ranks

    def __len__(self) -> int:
        return sum(count for _, count in self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(2)
        for size, count in self.sizes:
            for _ in range(count):
                drawn = torch.randint(CROPS, (size * self.ranks,), generator=generator)
                yield drawn[self.rank :: self.ranks].tolist()


def ladder_loader(tokens: int, sizes: Sequence[tuple[int, int]], rank: int, ranks: int) -> DataLoader[Tensor]:
    """Batches of the sizes that are asked for."""
    return DataLoader(Text(tokens), batch_sampler=Ladder(sizes, rank, ranks))


def plain_loader(tokens: int) -> DataLoader[Tensor]:
    """What a user passes to ``fit``, for a strategy that picks the batch size itself."""
    return DataLoader(Text(tokens), batch_size=1, shuffle=True)
