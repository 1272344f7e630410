"""Which gathers are started ahead, by what followed last time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_osdp.engine.fairscale.collective_order import CollectiveOrder


class Unit:
    """Notes when it is gathered ahead."""

    def __init__(self, label: str, started: list[str]) -> None:
        self.label, self._started = label, started

    def start_prefetch(self) -> None:
        if self.label not in self._started:  # else it is on its way
            self._started.append(self.label)


def order_of(labels: str) -> tuple[CollectiveOrder, list[str]]:
    """The order of one rank by itself, which asks nobody."""
    started: list[str] = []
    order = CollectiveOrder(SimpleNamespace(size=lambda: 1))
    for label in labels:
        unit: Any = Unit(label, started)
        order.register(unit)
    return order, started


def play(order: CollectiveOrder, started: list[str], events: str) -> list[str]:
    """Run a step's gathers (``a`` in the forward, ``A`` in the backward) and reductions (``-a``); what each starts."""
    found = []
    order.begin_step()
    for event in events.split():
        unit = ord(event.strip("-").lower()) - ord("a")
        if event.startswith("-"):
            order.before_reduction(unit, [0])
            continue
        started.clear()
        order.before_gather(unit, in_backward=event.isupper())
        order.prefetch_next()
        found.append("".join(started))
    order.complete_backward()
    return found


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("a b c d D -d C -c B -b A -a", ["bc", "cd", "d", "", "cb", "ba", "a", ""]),
        ("a b c d -d -c B -b A -a", ["bc", "cd", "d", "", "a", ""]),  # c and d stay gathered
        ("a b A B B -b A -a", ["b", "", "b", "a", "a", ""]),  # a and b are recomputed: b is freed before it is gathered
    ],
)
def test_two_units_are_gathered_ahead_of_each(events: str, expected: list[str]) -> None:
    order, started = order_of("abcd")
    assert play(order, started, events) == [""] * len(expected)  # nothing is known in the first step
    assert play(order, started, events) == expected


def test_nothing_is_gathered_ahead_of_an_exchange_of_activations() -> None:
    """Its indices say which part of a tensor parallel operator runs."""
    order, started = order_of("abc")
    for expected in (["", ""], ["", ""]):
        found = []
        order.begin_step()
        for unit, indices in ((0, ()), (1, (2,)), (2, ())):
            started.clear()
            order.before_gather(unit, in_backward=False, indices=indices)
            if not indices:
                order.prefetch_next()
                found.append("".join(started))
        order.complete_backward()
        assert found == expected
