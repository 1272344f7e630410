"""Finds the blocks that repeat in a model, and what recomputing one of them would free.

Repeated blocks are neighbours of one class with the same operators inside: members of one container, or siblings with
numbered names. Of nested blocks the outermost count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_osdp.planning.spec.model import UNATTRIBUTED, Operator, RepeatedBlock
from lightning_osdp.profiling.tracing.moments import AttributedRecording, OpRun, fit_line
from lightning_osdp.profiling.tracing.recorder import Recording


@dataclass(frozen=True)
class RepeatedModule:
    """A module that is a repeated block."""

    name: str
    kind: str
    """Text that is equal for blocks that are alike."""
    operators: tuple[int, ...]
    """Indices of the operators inside."""
    recompute_blocker: str
    """Reason why the block can't be recomputed; empty if it can."""


def find_blocks(module: nn.Module, operators: Sequence[Operator], recording: Recording) -> tuple[RepeatedModule, ...]:
    """Return the repeated blocks in the order in which they run; those that never ran are left out."""
    modules = dict(module.named_modules())
    first_op = {call.name: call.start for call in reversed(recording.module_calls)}
    blocks = []
    for names in _similar_modules("", modules, operators):
        parent = names[0].rpartition(".")[0]
        kind = f"{type(modules[names[0]]).__name__} in {parent or 'the model'}"
        for name in names:
            if name in first_op:
                inside = tuple(index for index, operator in enumerate(operators) if _is_inside(operator.name, name))
                blocker = _recompute_blocker(name, modules[name], operators, recording)
                blocks.append(RepeatedModule(name, kind, inside, blocker))
    return tuple(sorted(blocks, key=lambda block: first_op[block.name]))


def _similar_modules(
    parent: str, modules: Mapping[str, nn.Module], operators: Sequence[Operator]
) -> Iterator[list[str]]:
    """Yield the names of blocks that are alike, the outermost ones below ``parent``."""
    families: dict[tuple[object, ...], list[str]] = defaultdict(list)
    children = [f"{parent}.{name}" if parent else name for name, _ in modules[parent].named_children()]
    for name in children:
        inside = [operator for operator in operators if _is_inside(operator.name, name)]
        if name in modules and inside:
            signatures = tuple((operator.name[len(name) :], operator.signature) for operator in inside)
            families[_stem(modules[parent], name), type(modules[name]), signatures].append(name)
    for names in families.values():
        if len(names) > 1 and names[0] not in {operator.name for operator in operators}:
            yield names
        else:
            for name in names:
                yield from _similar_modules(name, modules, operators)


def _stem(parent: nn.Module, name: str) -> str:
    """Return a text that is equal for members of one container, and for siblings with numbered names."""
    if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return ""
    own = name.rpartition(".")[2]
    stem = own.rstrip("0123456789")
    return own if stem == own else stem


def _is_inside(operator: str, name: str) -> bool:
    return operator == name or operator.startswith(f"{name}.")


def _recompute_blocker(name: str, block: nn.Module, operators: Sequence[Operator], recording: Recording) -> str:
    """Say to the user why the block can't be recomputed; empty if it can."""
    if recording.calls[name] != 1:
        return f"it runs {recording.calls[name]} times in one forward pass"
    for inner, module in block.named_modules():
        full_name = f"{name}.{inner}" if inner else name
        if full_name in recording.buffer_writers or (isinstance(module, _NormBase) and module.track_running_stats):
            kind = type(module).__name__
            return f"{full_name} ({kind}) changes its buffers in every forward: a second one would do it twice"
        if full_name in recording.state_changers:
            attribute = f"{full_name}.{recording.state_changers[full_name]}"
            return f"{attribute} changes in every forward: a second one would do it twice"
        if full_name in recording.recomputed_modules:
            return f"the model recomputes {full_name} by itself"
    if name in recording.outside_writers:
        return (
            f"{name} ({type(block).__name__}) changes in place what it is given: a second forward would see it changed"
        )
    for operator in operators:
        for parameter in operator.parameters:
            names = (parameter.name, *parameter.aliases)
            is_used_inside = any(_is_inside(each.rpartition(".")[0], name) for each in names)
            if is_used_inside and not _is_inside(operator.name, name):
                return f"{parameter.name} is also used outside of it"
    return ""


# -- what recomputing frees --------------------------------------------------------------------------------------------


def describe_blocks(
    blocks: Sequence[RepeatedModule], steps: Mapping[int, AttributedRecording], op_runs: Mapping[int, Sequence[OpRun]]
) -> tuple[RepeatedBlock, ...]:
    """Return the blocks with the bytes that recomputing them frees, as lines through the traced batch sizes.

    Blocks without a backward are left out, and those of which nothing would be freed unless there is a reason for it.

    Args:
        blocks: The blocks that ``find_blocks`` returns.
        steps: The step at one or two batch sizes, with the block of each op.
        op_runs: Runs of ops by batch size.
    """
    largest = max(steps)
    flops = [0.0] * (len(blocks) + 1)
    for op, owner, place in zip(steps[largest].ops, steps[largest].owners, steps[largest].blocks, strict=True):
        flops[place] += op.flops if owner == UNATTRIBUTED and op.phase == "forward" else 0.0
    lifetimes = {size: StorageLifetimes(step.recording) for size, step in steps.items()}
    described = []
    for index, block in enumerate(blocks):
        forward, backward = (_moment_span(op_runs[largest], index, phase) for phase in ("forward", "backward"))
        sizes = {size: each.block_bytes(block.name) for size, each in lifetimes.items()}
        known = {size: values for size, values in sizes.items() if values is not None}
        if forward is None or backward is None or len(known) < len(sizes):
            continue
        saves, kept_inputs, live_before_forward, live_before_backward = (
            fit_line({size: values[field] for size, values in known.items()}) for field in range(4)
        )
        if saves.value_at(largest) > 0 or block.recompute_blocker:
            described.append(
                RepeatedBlock(
                    name=block.name,
                    kind=block.kind,
                    operators=block.operators,
                    forward=forward,
                    backward=backward,
                    recompute_saves=saves,
                    kept_inputs=kept_inputs,
                    live_before_forward=live_before_forward,
                    live_before_backward=live_before_backward,
                    unattributed_flops_per_sample=flops[index] / largest,
                    recompute_blocker=block.recompute_blocker,
                )
            )
    return tuple(described)


def _moment_span(op_runs: Sequence[OpRun], block: int, phase: str) -> tuple[int, int] | None:
    """Return the indices of the first and the last run of a block in a phase, or None."""
    indices = [index for index, run in enumerate(op_runs) if run.block == block and run.phase == phase]
    return (indices[0], indices[-1]) if indices else None


class StorageLifetimes:
    """The ops at which the storages of a recording were made and freed, gradients of parameters left out."""

    def __init__(self, recording: Recording) -> None:
        self._calls = {call.name: call for call in reversed(recording.module_calls)}
        self._first_backward_op: dict[str, int] = {}
        for position, op in enumerate(recording.ops):
            if op.phase == "backward":
                for name in op.site:
                    self._first_backward_op.setdefault(name, position)
        self._storage_bytes = np.array(recording.storage_bytes, dtype=float)
        self._storage_bytes[list(recording.gradient_storages | recording.planned_storages)] = 0.0
        self._kept_by_earlier: set[int] = set()
        self._made_at, self._freed_at = (np.full(len(self._storage_bytes), len(recording.ops)) for _ in range(2))
        for position, storage, sign in recording.events:
            (self._made_at if sign > 0 else self._freed_at)[storage] = position

    def block_bytes(self, name: str) -> tuple[float, float, float, float] | None:
        """Return what recomputing a block frees and what inputs it keeps, and live bytes before forward and backward.

        Blocks have to be asked for in the order in which they run: what several are given is kept once. The result is
        None for a block without a backward.
        """
        call, backward = self._calls[name], self._first_backward_op.get(name)
        if backward is None:
            return None
        saved = (self._made_at >= call.start) & (self._made_at < call.stop) & (self._freed_at >= backward)
        saved[list(call.outputs)] = False
        inputs = {storage for storage in call.inputs - self._kept_by_earlier if self._freed_at[storage] < backward}
        self._kept_by_earlier |= inputs
        kept = float(self._storage_bytes[list(inputs)].sum())
        saves = float(self._storage_bytes[saved].sum()) - kept
        return saves, kept, self._live_bytes(call.start), self._live_bytes(backward)

    def _live_bytes(self, op: int) -> float:
        return float(self._storage_bytes[self._made_at < op].sum() - self._storage_bytes[self._freed_at < op].sum())
