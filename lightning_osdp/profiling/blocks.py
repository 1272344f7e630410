"""Finds the blocks that repeat in a model, and what recomputing one of them would free.

Blocks are alike modules next to each other: of one class, members of one container or siblings with numbered names,
with the same operators inside. Of nested ones the outermost count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_osdp.planning.operators import OUTSIDE, Block, Line, Operator
from lightning_osdp.profiling.moments import Stretch, line
from lightning_osdp.profiling.recorder import Recording

NO_BLOCK = -1
"""Of an op that lies in no block."""


@dataclass(frozen=True)
class Repeated:
    """A block as it was found.

    Attributes:
        name: of the module.
        kind: what it has in common with its like.
        operators: indices of those inside.
        pinned: why it can't be recomputed; empty if it can.
    """

    name: str
    kind: str
    operators: tuple[int, ...]
    pinned: str


def find_blocks(module: nn.Module, operators: Sequence[Operator], recording: Recording) -> tuple[Repeated, ...]:
    """Repeated blocks in the order in which they run; those that never ran are left out."""
    modules = dict(module.named_modules())
    first = {call.name: call.start for call in reversed(recording.module_calls)}
    found = []
    for names in _families("", modules, operators):
        parent = names[0].rpartition(".")[0]
        kind = f"{type(modules[names[0]]).__name__} in {parent or 'the model'}"
        for name in names:
            inside = tuple(index for index, operator in enumerate(operators) if _lies_in(operator.name, name))
            if name in first:
                found.append(Repeated(name, kind, inside, _why_not(name, modules[name], operators, recording)))
    return tuple(sorted(found, key=lambda block: first[block.name]))


def _families(parent: str, modules: Mapping[str, nn.Module], operators: Sequence[Operator]) -> Iterator[list[str]]:
    """Names of blocks that are alike, the outermost ones below ``parent``."""
    family: dict[tuple[object, ...], list[str]] = defaultdict(list)
    children = [f"{parent}.{name}" if parent else name for name, _ in modules[parent].named_children()]
    for name in children:
        inside = [operator for operator in operators if _lies_in(operator.name, name)]
        if name in modules and inside:
            signatures = tuple((operator.name[len(name) :], operator.signature) for operator in inside)
            family[_stem(modules[parent], name), type(modules[name]), signatures].append(name)
    for names in family.values():
        if len(names) > 1 and names[0] not in {operator.name for operator in operators}:
            yield names
        else:
            for name in names:
                yield from _families(name, modules, operators)


def _stem(parent: nn.Module, name: str) -> str:
    """Equal for members of one container, and for siblings whose names differ in a number at the end."""
    if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return ""
    own = name.rpartition(".")[2]
    stem = own.rstrip("0123456789")
    return own if stem == own else stem


def _lies_in(operator: str, name: str) -> bool:
    return operator == name or operator.startswith(f"{name}.")


def _why_not(name: str, block: nn.Module, operators: Sequence[Operator], recording: Recording) -> str:
    """Why the block can't be recomputed, in words for the user; empty if it can."""
    if recording.calls[name] != 1:
        return f"it runs {recording.calls[name]} times in one forward pass"
    for inner, module in block.named_modules():
        where = f"{name}.{inner}" if inner else name
        if where in recording.writers or (isinstance(module, _NormBase) and module.track_running_stats):
            kind = type(module).__name__
            return f"{where} ({kind}) changes its buffers in every forward: a second one would do it twice"
        if where in recording.rerun:
            return f"the model recomputes {where} by itself"
    for operator in operators:
        for parameter in operator.parameters:
            names = [_lies_in(one.rpartition(".")[0], name) for one in (parameter.name, *parameter.aliases)]
            if any(names) and not _lies_in(operator.name, name):
                return f"{parameter.name} is also used outside of it"
    return ""


# -- what recomputing frees --------------------------------------------------------------------------------------------


def block_of_ops(recording: Recording, blocks: Sequence[Repeated]) -> list[int]:
    """The block that each op belongs to, or ``NO_BLOCK``."""
    index = {block.name: at for at, block in enumerate(blocks)}
    return [next((index[name] for name in op.site if name in index), NO_BLOCK) for op in recording.ops]


def blocks_of(
    blocks: Sequence[Repeated],
    recordings: Mapping[int, Recording],
    stretches: Mapping[int, Sequence[Stretch]],
    owners: Sequence[int],
) -> tuple[Block, ...]:
    """The blocks with what they save, as lines through the traced batch sizes.

    Those without a backward are left out, and those of which nothing would be freed, unless there is a reason for it.

    Args:
        blocks: as found.
        recordings: by batch size, one or two.
        stretches: the moments, by batch size.
        owners: of the ops of the largest batch size.
    """
    largest = max(recordings)
    placed = block_of_ops(recordings[largest], blocks)
    flops = [0.0] * (len(blocks) + 1)
    for op, owner, at in zip(recordings[largest].ops, owners, placed, strict=True):
        flops[at] += op.flops if owner == OUTSIDE and op.phase == "forward" else 0.0
    lives = {size: _Lives(recording) for size, recording in recordings.items()}
    found = []
    for at, block in enumerate(blocks):
        spans = [_spans(stretches[largest], at, phase) for phase in ("forward", "backward")]
        sizes = {size: each.held(block.name) for size, each in lives.items()}
        if None in spans or any(held is None for held in sizes.values()):
            continue
        saved, before_forward, before_backward = (
            _line({size: held[field] for size, held in sizes.items() if held is not None}) for field in range(3)
        )
        if saved.at(largest) > 0 or block.pinned:
            found.append(
                Block(
                    name=block.name,
                    kind=block.kind,
                    operators=block.operators,
                    forward=spans[0] or (0, 0),
                    backward=spans[1] or (0, 0),
                    saved=saved,
                    before_forward=before_forward,
                    before_backward=before_backward,
                    outside_flops_per_sample=flops[at] / largest,
                    pinned=block.pinned,
                )
            )
    return tuple(found)


def _line(values: Mapping[int, float]) -> Line:
    points = sorted(values.items())
    return Line(fixed=points[0][1]) if len(points) == 1 else line(points[0], points[1])


def _spans(stretches: Sequence[Stretch], block: int, phase: str) -> tuple[int, int] | None:
    at = [index for index, stretch in enumerate(stretches) if stretch.block == block and stretch.phase == phase]
    return (at[0], at[-1]) if at else None


class _Lives:
    """When the storages of a recording were made and freed, gradients of parameters left out."""

    def __init__(self, recording: Recording) -> None:
        self._calls = {call.name: call for call in reversed(recording.module_calls)}
        self._backward: dict[str, int] = {}
        for at, op in enumerate(recording.ops):
            if op.phase == "backward":
                for name in op.site:
                    self._backward.setdefault(name, at)
        self._sizes = np.array(recording.storage_bytes, dtype=float)
        self._sizes[list(recording.excluded)] = 0.0
        self._made, self._freed = (np.full(len(self._sizes), len(recording.ops)) for _ in range(2))
        for at, storage, sign in recording.events:
            (self._made if sign > 0 else self._freed)[storage] = at

    def held(self, name: str) -> tuple[float, float, float] | None:
        """Bytes that a block's forward saves for its backward, and live ones before each; None without a backward."""
        call, backward = self._calls[name], self._backward.get(name)
        if backward is None:
            return None
        saved = (self._made >= call.start) & (self._made < call.stop) & (self._freed >= backward)
        saved[list(call.outputs)] = False
        return float(self._sizes[saved].sum()), self._live(call.start), self._live(backward)

    def _live(self, op: int) -> float:
        return float(self._sizes[self._made < op].sum() - self._sizes[self._freed < op].sum())
