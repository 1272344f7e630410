"""Group a plan's operators into the rows of a table, as people think of a model.

Blocks that are treated alike are one row (``decoder.layers.0-6``), followed by the operators in them that differ. The
other operators are grouped by what they lie in (``transformer: wte, wpe``) and by numbers in their names (``net.0-7``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.report.operator_runs import describe_choice

MAX_ROWS = 40
"""Rows of a table; what is left makes one row more."""

MAX_PIECES = 3
"""Ranges of numbers that a name may have (``layers.0-3,5,7-9``) before their number is given instead."""

MAIN_FRACTION = 0.9
"""Fraction of a block's parameters whose mode stands for the block; otherwise each mode has a row of its own."""


@dataclass(frozen=True)
class TableRow:
    """A row of the table of operators; ``is_part`` if it is about some operators of the block above it."""

    label: str
    mode: str
    count: int
    num_parameters: int
    is_part: bool = False


class _Numbered(NamedTuple):
    """Things that are alike but for numbers in their names.

    Attributes:
        tokens: their name, split at numbers: a number or a range of numbers is at each odd index.
        modes: the operators of each: what their names add to its own, and their modes; equal for things that are alike.
        members: the operators of each of them.
    """

    tokens: tuple[str, ...]
    modes: tuple[tuple[str, str], ...]
    members: list[Sequence[OperatorPlan]]

    @property
    def name(self) -> str:
        """Their common name."""
        return "".join(self.tokens)

    @property
    def mode(self) -> str:
        """The mode of the first operator."""
        return self.modes[0][1]

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all of them."""
        return sum(operator.num_parameters for operators in self.members for operator in operators)


def operator_rows(plan: ExecutionPlan) -> list[TableRow]:
    """Return the rows of the table of a plan's operators, blocks that are alike in one."""
    known = {block.name for block in plan.blocks}
    enclosing = {prefix for operator in plan.operators for prefix in _prefixes(operator.name)}
    containers: dict[tuple[str, bool], list[OperatorPlan]] = {}
    for operator in plan.operators:
        block = _block_name(operator.name, known)
        containers.setdefault((operator.name if block is None else block, block is not None), []).append(operator)
    things = [
        _Numbered(_split_at_numbers(name), tuple((op.name[len(name) :], _mode_text(op)) for op in own), [own])
        for (name, _), own in containers.items()
    ]
    rows: list[TableRow] = []
    single: dict[tuple[str, str], list[_Numbered]] = {}
    position: dict[tuple[str, str], int] = {}
    for thing in _merge_numbers(things):
        if len(thing.members[0]) > 1:
            rows += _block_rows(thing)
            continue
        suffix, mode = thing.modes[0]
        name = thing.name + suffix + " (itself)" * (thing.members[0][0].name in enclosing)
        key = (name.rpartition(".")[0], mode)
        single.setdefault(key, []).append(thing._replace(tokens=(name,)))
        if key not in position:
            position[key] = len(rows)
            rows.append(TableRow("", mode, 0, 0))
    for key, index in position.items():
        rows[index] = _joined_row(key, single[key])
    return _limit_rows(rows)


def _prefixes(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _block_name(name: str, known: Collection[str]) -> str | None:
    """Return the block that an operator lies in: a known one, or what its first number names; None if in none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in known:
            return prefix
    numbered = next((index for index, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return None if numbered is None else ".".join(parts[: numbered + 1])


def _mode_text(operator: OperatorPlan) -> str:
    notes = [", one unit"] * bool(operator.unit) + [", recomputed"] * operator.is_recomputed
    return describe_choice(operator.choice) + "".join(notes)


def _split_at_numbers(name: str) -> tuple[str, ...]:
    return tuple(re.split(r"(\d+)", name))


def _merge_numbers(things: Sequence[_Numbered]) -> list[_Numbered]:
    """Merge things that differ in one number of their names, by the last number first, in the order of their firsts."""
    for back in range(1, max((len(thing.tokens) // 2 for thing in things), default=0) + 1):
        groups: dict[Hashable, list[_Numbered]] = {}
        for thing in things:
            at = len(thing.tokens) - 2 * back
            same = (thing.tokens[:at], thing.tokens[at + 1 :]) if at > 0 else thing.tokens
            groups.setdefault((same, thing.modes), []).append(thing)
        things = [_merge(group, -2 * back) for group in groups.values()]
    return list(things)


def _merge(things: Sequence[_Numbered], at: int) -> _Numbered:
    first = things[0]
    if len(things) == 1:
        return first
    tokens = list(first.tokens)
    tokens[at] = _format_numbers([thing.tokens[at] for thing in things])
    return _Numbered(tuple(tokens), first.modes, [member for thing in things for member in thing.members])


def _format_numbers(numbers: Iterable[str]) -> str:
    """Return numbers as ranges, ``0-3,5,7-9``, or ``(500 of 0-998)`` if these are too many."""
    texts = sorted(numbers, key=int)
    ends = [index for index, (a, b) in enumerate(pairwise(texts)) if int(b) != int(a) + 1]
    starts = [0, *(index + 1 for index in ends)]
    pieces = [(texts[start], texts[end]) for start, end in zip(starts, [*ends, len(texts) - 1], strict=True)]
    if len(pieces) > MAX_PIECES:
        return f"({len(texts)} of {texts[0]}-{texts[-1]})"
    return ",".join(first if first == last else f"{first}-{last}" for first, last in pieces)


def _block_rows(blocks: _Numbered) -> list[TableRow]:
    """Return the row of some blocks that are alike, and a row for each kind of operators that differs in them."""
    first = blocks.members[0]
    is_recomputed = all(operator.is_recomputed for operator in first)
    parts = [
        _Numbered(
            _split_at_numbers(suffix.removeprefix(".") or "(the block itself)"),
            (("", mode.removesuffix(", recomputed" * is_recomputed)),),
            [[operators[index]] for operators in blocks.members],
        )
        for index, (suffix, mode) in enumerate(blocks.modes)
    ]
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.mode] = sizes.get(part.mode, 0) + part.num_parameters
    main = max(sizes, key=sizes.__getitem__)
    others = [part for part in parts if part.mode != main]
    if sizes[main] >= MAIN_FRACTION * blocks.num_parameters:
        mode = f"{f'{len(parts) - len(others)} of' if others else 'all'} {len(parts)} {main}"
    else:
        mode, others = "mixed", parts
    mode += ", recomputed" * is_recomputed
    rows = [TableRow(blocks.name, mode, len(parts) * len(blocks.members), blocks.num_parameters)]
    groups: dict[tuple[str, str], list[_Numbered]] = {}
    for part in _merge_numbers(others):
        groups.setdefault((part.name.rpartition(".")[0], part.mode), []).append(part)
    return rows + [replace(_joined_row(key, group), is_part=True) for key, group in groups.items()]


def _joined_row(key: tuple[str, str], things: Sequence[_Numbered]) -> TableRow:
    """Return the row of operators in the same module with the same mode, as ``MODULE: NAME, NAME``."""
    parent, mode = key
    names = [thing.name.removeprefix(f"{parent}." if parent else "") or "(the module itself)" for thing in things]
    start = f"{parent}{'.' if len(names) == 1 else ': '}" if parent else ""
    count = sum(len(thing.members) for thing in things)
    return TableRow(start + ", ".join(names), mode, count, sum(thing.num_parameters for thing in things))


def _limit_rows(rows: Sequence[TableRow]) -> list[TableRow]:
    left = rows[MAX_ROWS:]
    if len(left) <= 1:
        return list(rows)
    whole = [row for row in left if not row.is_part]
    count, num_parameters = sum(row.count for row in whole), sum(row.num_parameters for row in whole)
    return [*rows[:MAX_ROWS], TableRow("(others: osdp explain lists them)", "", count, num_parameters)]
