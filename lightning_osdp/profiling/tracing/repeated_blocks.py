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

from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, Operator, RepeatedBlock
from lightning_osdp.profiling.tracing.moments import OpRun, line_through
from lightning_osdp.profiling.tracing.recorder import Recording

NO_BLOCK = -1
"""Of an op that lies in no block."""


@dataclass(frozen=True)
class RepeatedModule:
    """A block as it was found.

    Attributes:
        name: of the module.
        kind: what it has in common with its like.
        operators: indices of those inside.
        recompute_blocker: why it can't be recomputed; empty if it can.
    """

    name: str
    kind: str
    operators: tuple[int, ...]
    recompute_blocker: str


def find_blocks(module: nn.Module, operators: Sequence[Operator], recording: Recording) -> tuple[RepeatedModule, ...]:
    """Repeated blocks in the order in which they run; those that never ran are left out."""
    modules = dict(module.named_modules())
    first = {call.name: call.start for call in reversed(recording.module_calls)}
    found = []
    for names in _similar_modules("", modules, operators):
        parent = names[0].rpartition(".")[0]
        kind = f"{type(modules[names[0]]).__name__} in {parent or 'the model'}"
        for name in names:
            inside = tuple(index for index, operator in enumerate(operators) if _is_inside(operator.name, name))
            if name in first:
                found.append(
                    RepeatedModule(name, kind, inside, _recompute_blocker(name, modules[name], operators, recording))
                )
    return tuple(sorted(found, key=lambda block: first[block.name]))


def _similar_modules(
    parent: str, modules: Mapping[str, nn.Module], operators: Sequence[Operator]
) -> Iterator[list[str]]:
    """Names of blocks that are alike, the outermost ones below ``parent``."""
    family: dict[tuple[object, ...], list[str]] = defaultdict(list)
    children = [f"{parent}.{name}" if parent else name for name, _ in modules[parent].named_children()]
    for name in children:
        inside = [operator for operator in operators if _is_inside(operator.name, name)]
        if name in modules and inside:
            signatures = tuple((operator.name[len(name) :], operator.signature) for operator in inside)
            family[_stem(modules[parent], name), type(modules[name]), signatures].append(name)
    for names in family.values():
        if len(names) > 1 and names[0] not in {operator.name for operator in operators}:
            yield names
        else:
            for name in names:
                yield from _similar_modules(name, modules, operators)


def _stem(parent: nn.Module, name: str) -> str:
    """Equal for members of one container, and for siblings whose names differ in a number at the end."""
    if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return ""
    own = name.rpartition(".")[2]
    stem = own.rstrip("0123456789")
    return own if stem == own else stem


def _is_inside(operator: str, name: str) -> bool:
    return operator == name or operator.startswith(f"{name}.")


def _recompute_blocker(name: str, block: nn.Module, operators: Sequence[Operator], recording: Recording) -> str:
    """Why the block can't be recomputed, in words for the user; empty if it can."""
    if recording.calls[name] != 1:
        return f"it runs {recording.calls[name]} times in one forward pass"
    for inner, module in block.named_modules():
        where = f"{name}.{inner}" if inner else name
        if where in recording.buffer_writers or (isinstance(module, _NormBase) and module.track_running_stats):
            kind = type(module).__name__
            return f"{where} ({kind}) changes its buffers in every forward: a second one would do it twice"
        if where in recording.recomputed_modules:
            return f"the model recomputes {where} by itself"
    for operator in operators:
        for parameter in operator.parameters:
            names = [_is_inside(one.rpartition(".")[0], name) for one in (parameter.name, *parameter.aliases)]
            if any(names) and not _is_inside(operator.name, name):
                return f"{parameter.name} is also used outside of it"
    return ""


# -- what recomputing frees --------------------------------------------------------------------------------------------


def blocks_of_ops(recording: Recording, blocks: Sequence[RepeatedModule]) -> list[int]:
    """The block that each op belongs to, or ``NO_BLOCK``."""
    index = {block.name: at for at, block in enumerate(blocks)}
    return [next((index[name] for name in op.site if name in index), NO_BLOCK) for op in recording.ops]


def describe_blocks(
    blocks: Sequence[RepeatedModule],
    recordings: Mapping[int, Recording],
    op_runs: Mapping[int, Sequence[OpRun]],
    owners: Sequence[int],
) -> tuple[RepeatedBlock, ...]:
    """The blocks with what they save, as lines through the traced batch sizes.

    Those without a backward are left out, and those of which nothing would be freed, unless there is a reason for it.

    Args:
        blocks: as found.
        recordings: by batch size, one or two.
        op_runs: the moments, by batch size.
        owners: of the ops of the largest batch size.
    """
    largest = max(recordings)
    placed = blocks_of_ops(recordings[largest], blocks)
    flops = [0.0] * (len(blocks) + 1)
    for op, owner, at in zip(recordings[largest].ops, owners, placed, strict=True):
        flops[at] += op.flops if owner == UNATTRIBUTED and op.phase == "forward" else 0.0
    lives = {size: StorageLifetimes(recording) for size, recording in recordings.items()}
    found = []
    for at, block in enumerate(blocks):
        spans = [_moment_span(op_runs[largest], at, phase) for phase in ("forward", "backward")]
        sizes = {size: each.saved_and_live(block.name) for size, each in lives.items()}
        if None in spans or any(held is None for held in sizes.values()):
            continue
        saved, before_forward, before_backward = (
            _line_over_batch_sizes({size: held[field] for size, held in sizes.items() if held is not None})
            for field in range(3)
        )
        if saved.value_at(largest) > 0 or block.recompute_blocker:
            found.append(
                RepeatedBlock(
                    name=block.name,
                    kind=block.kind,
                    operators=block.operators,
                    forward=spans[0] or (0, 0),
                    backward=spans[1] or (0, 0),
                    recompute_saves=saved,
                    live_before_forward=before_forward,
                    live_before_backward=before_backward,
                    unattributed_flops_per_sample=flops[at] / largest,
                    recompute_blocker=block.recompute_blocker,
                )
            )
    return tuple(found)


def _line_over_batch_sizes(values: Mapping[int, float]) -> LinearInBatch:
    points = sorted(values.items())
    return LinearInBatch(fixed=points[0][1]) if len(points) == 1 else line_through(points[0], points[1])


def _moment_span(op_runs: Sequence[OpRun], block: int, phase: str) -> tuple[int, int] | None:
    at = [index for index, stretch in enumerate(op_runs) if stretch.block == block and stretch.phase == phase]
    return (at[0], at[-1]) if at else None


class StorageLifetimes:
    """When the storages of a recording were made and freed, gradients of parameters left out."""

    def __init__(self, recording: Recording) -> None:
        self._calls = {call.name: call for call in reversed(recording.module_calls)}
        self._first_backward_op: dict[str, int] = {}
        for at, op in enumerate(recording.ops):
            if op.phase == "backward":
                for name in op.site:
                    self._first_backward_op.setdefault(name, at)
        self._storage_bytes = np.array(recording.storage_bytes, dtype=float)
        self._storage_bytes[list(recording.gradient_storages)] = 0.0
        self._made_at, self._freed_at = (np.full(len(self._storage_bytes), len(recording.ops)) for _ in range(2))
        for at, storage, sign in recording.events:
            (self._made_at if sign > 0 else self._freed_at)[storage] = at

    def saved_and_live(self, name: str) -> tuple[float, float, float] | None:
        """Bytes that a block's forward saves for its backward, and live ones before each; None without a backward."""
        call, backward = self._calls[name], self._first_backward_op.get(name)
        if backward is None:
            return None
        saved = (self._made_at >= call.start) & (self._made_at < call.stop) & (self._freed_at >= backward)
        saved[list(call.outputs)] = False
        return float(self._storage_bytes[saved].sum()), self._live_bytes(call.start), self._live_bytes(backward)

    def _live_bytes(self, op: int) -> float:
        return float(self._storage_bytes[self._made_at < op].sum() - self._storage_bytes[self._freed_at < op].sum())
