"""All ranks run the collectives of units in one order, whatever their modules do.

Note [agreed order]: ranks may run different operators (layers dropped at random, experts without tokens, early exits).
Each collective is announced before it runs. What follows the last two is known from the first time on: a rank whose
next collective is that one goes on, which is one comparison. Any other rank asks, and ranks that went on without asking
are joined (``backend.rank_agreement``). Where ranks want different collectives within one step, the first of the
forward or the last of the backward is chosen. All ranks take part in it: those that do not need it gather and free, or
add a zero gradient. So gradients are what DDP's are: a mean in which a rank without a gradient counts as zero. A unit
that no rank runs is in no order, and its gradient stays None.

Note [places]: a rank that has begun the next step can't take part in the last one. Beginnings and ends are part of the
order, and requests of ranks at different places are an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.backend.rank_agreement import ADVICE, Decision, RankAgreement, Request
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.cost.sharding_scopes import PREFETCHED_UNITS

STABLE_COUNT = 8
"""How often in succession ranks have to agree on another next collective until it is expected without asking."""

FIRST_ASKING_STEPS, MAX_ASKING_STEPS = 32, 4096
"""Steps in which ranks ask for each collective after they wanted different ones: at first, and if it recurs."""

_JOINABLE = {"trainable": -1, "forward": 0, "evaluate": 0, "backward": 1, "reduce": 1, "replicated": 2, "late": 3}
"""The kinds of events in which a rank can take part that wants another one, by what comes first."""

_WAITING = ("end", "evaluated", "sync", "access")
"""The kinds of events before which a rank takes part in those of others."""

_GRADIENT_ADVICE = (
    "{} is tensor parallel, so that ranks compute for each other: what a run of it gives must be used on all of them, "
    "or on none. Where a rank does not use it, or detaches it, add (0 * output).sum() to its loss, or train without "
    "tensor parallelism, OSDPCallback(tensor_parallel=False)"
)
"""What to do where ranks differ in a backward pass of a tensor parallel operator."""

_TEXTS = {
    "forward": ("runs {}", "ran {}"),
    "evaluate": ("runs {} without gradients", "ran {} without gradients"),
    "backward": ("gathers {} for its backward", "gathered {} for its backward"),
    "reduce": ("reduces the gradient of {}", "reduced the gradient of {}"),
    "replicated": ("reduces replicated gradients", "reduced replicated gradients"),
    "late": (
        "reduces gradients of parameters that it has unfrozen",
        "reduced gradients of parameters that were unfrozen",
    ),
    "trainable": ("trains other parameters", "has begun to train other parameters"),
    "end": ("ends its backward pass", "ended its backward pass"),
    "step": ("begins the next training step", "began a training step"),
    "sync": ("takes part in {}", "took part in a collective operation"),
    "evaluation": ("begins the next evaluation step", "began an evaluation step"),
    "evaluated": ("ends its evaluation step", "ended its evaluation step"),
    "access": ("reads or changes {} outside of its operator", "read or changed a parameter outside of its operator"),
    "": ("", "did nothing"),
}
"""Events in words, present and past."""


class OrderedUnit(Protocol):
    """What takes part in collectives."""

    label: str

    def describe(self, indices: Sequence[int]) -> str:
        """Return its label, and what ranks may run differently of it."""

    def join_gather(self, indices: Sequence[int]) -> None:
        """Take part in a gather of the parameters ``indices``, all if empty, and free the result."""

    def join_reduction(self, indices: Sequence[int]) -> None:
        """Take part in a reduction with a zero gradient for the parameters ``indices``."""

    def exchanges_gradients(self, indices: Sequence[int]) -> bool:
        """Return whether the ranks of a group exchange gradients of each other's samples in it."""

    def can_run(self, ranks: Collection[int], indices: Sequence[int]) -> bool:
        """Return whether these ranks, which want it, are enough for a gather or reduction of ``indices``."""

    def start_prefetch(self) -> None:
        """Start to gather all parameters if the unit is prefetched."""


class CollectiveOrder:
    """The order of the collectives of one engine; see Note [agreed order].

    Args:
        group: all ranks.
    """

    def __init__(self, group: Any) -> None:
        has_others = group.size() > 1 and not is_emulated(group)
        self._agreement = RankAgreement(group, self._decide, self._describe_past) if has_others else None
        self._units: list[OrderedUnit] = []
        self._last = ("", "")
        self._next: dict[tuple[str, str], tuple[str, int]] = {}
        """What followed two events last time, and how often that has to recur until it is expected."""
        self._num_steps = self._asking_steps = 0
        self._next_asking_steps = FIRST_ASKING_STEPS
        self._has_backward = self._has_differed = self._has_groups = False
        self._failure = ""
        self._pass_kinds: tuple[str, ...] = ("backward", "reduce", "replicated", "late")
        """The kinds of events after which a backward pass has to be ended on all ranks."""
        self._place = "before the first training step"
        self.is_in_training_step = False
        """Whether the code that runs is that of the traced step."""
        self.join_replicated: Callable[[], None] = lambda: None
        """Takes part in the reduction of replicated gradients."""
        self.join_late: Callable[[], None] = lambda: None
        """Takes part in the reduction of replicated gradients that were in no bucket on some ranks."""
        self.on_trainable: Callable[[str, bool], None] = lambda trainable, is_unanimous: None
        """Called with the parameters that ranks have begun to train, and whether these are the same on all."""

    def register(self, unit: OrderedUnit, is_grouped: bool = False) -> int:
        """Return the index of ``unit``; units come in the order of the plan.

        Args:
            unit: what takes part in collectives.
            is_grouped: whether its collectives are those of some ranks, for which others don't stand in.
        """
        self._units.append(unit)
        if is_grouped and not self._has_groups:  # what is whole there has no collective before the pass is over
            self._has_groups, self._pass_kinds = True, (*self._pass_kinds, "forward")
        return len(self._units) - 1

    def before_gather(self, unit: int, in_backward: bool, indices: Sequence[int] = ()) -> None:
        """Return when the next collective on all ranks is the gather of a unit.

        Args:
            unit: its index.
            in_backward: whether a backward pass is running.
            indices: those of its parameters that are gathered, if not all.
        """
        kind = "backward" if in_backward else "forward" if torch.is_grad_enabled() else "evaluate"
        self._before(f"{kind} {unit} {','.join(map(str, indices))}" if indices else f"{kind} {unit}")

    def before_reduction(self, unit: int, indices: Sequence[int]) -> None:
        """Return when the next collective on all ranks is the reduction of a unit's gradients of these parameters."""
        self._before(f"reduce {unit} {','.join(map(str, indices))}")

    def begin_step(self) -> None:
        """Note that a training step begins."""
        self._asking_steps, self._has_differed = max(0, self._asking_steps - 1), False
        self._before("step")
        self._num_steps += 1
        self._place, self._has_backward = f"in training step {self._num_steps}", True
        self.is_in_training_step = True

    def begin_evaluation(self, name: str) -> None:
        """Note that a step without a backward pass begins.

        Args:
            name: names the step in errors, as "validation batch 3".
        """
        self._before("evaluation")
        self._place, self.is_in_training_step = f"in {name}", False

    def end_evaluation(self) -> None:
        """Wait until the step without a backward pass is over on all ranks."""
        self._before("evaluated")
        self._place = self._place.replace("in ", "after ", 1)

    @property
    def has_backward(self) -> bool:
        """Return whether a step or a backward pass has begun whose end is not noted yet."""
        return self._has_backward and self._agreement is not None

    def before_trainable(self, trainable: str) -> None:
        """Tell the other ranks that this one trains other parameters than before; a text tells which."""
        self._before(f"trainable -1 {trainable}")

    def before_replicated(self) -> None:
        """Return when the next collectives on all ranks are those of replicated gradients."""
        self._before("replicated")

    def before_late(self) -> None:
        """Return when the next collectives on all ranks are those of replicated gradients that were in no bucket."""
        self._before("late")

    def complete_backward(self) -> None:
        """Take part in what other ranks' backward passes still reduce."""
        self._before("end")
        self._has_backward, self._place = False, f"after the backward pass of training step {self._num_steps}"

    def before_collective(self, operation: str) -> None:
        """Return when all ranks are about to run a collective ``operation`` that is not the engine's.

        It is never expected without asking: a rank that goes on into it can't be joined.
        """
        if self._agreement is not None:
            self._ask(f"sync -1 {operation}", is_learned=False)

    def before_access(self, parameter: str) -> None:
        """Check that all ranks are about to read or change a parameter outside of its operator.

        Args:
            parameter: its name.
        """
        self._before(f"access -1 {parameter}")

    def close(self) -> None:
        """Answer no other rank any more."""
        if self._agreement is not None:
            self._agreement.close()

    def expect_differences(self) -> None:
        """Ask for each collective until the step is over, since this rank runs other things in it than others."""
        self._has_differed = True

    def prefetch_next(self) -> None:
        """Start the gathers that are expected after the one that has just run, unless ranks differed lately."""
        kind, unit, _ = _parse(self._last[1])
        if self._asking_steps or kind not in ("forward", "backward"):
            return  # evaluation is planned with memory for no more than one unit
        last, num_gathers = self._last, 0
        for _ in range(len(self._next)):  # a bound: what is expected may go round in a circle
            event = self._expect_after(last)
            next_kind, next_unit, indices = _parse(event)
            if next_kind != "reduce":
                if next_kind != kind or indices or num_gathers == PREFETCHED_UNITS:
                    return
                num_gathers += 1
                if next_unit != unit:  # which is freed first
                    self._units[next_unit].start_prefetch()
            last = (last[1], event)

    def _expect_after(self, last: tuple[str, str]) -> str:
        """Return what follows two events on all ranks; nothing if that is not known."""
        following, times_to_recur = self._next.get(last, ("", 0))
        return "" if times_to_recur else following

    def _before(self, event: str) -> None:
        if self._agreement is None:  # no other rank can do anything else
            self._learn(event, is_unanimous=True)
            self._note(event)
            return
        is_asking = self._asking_steps or self._has_differed or self._failure
        if not is_asking and self._expect_after(self._last) == event and self._agreement.advance(event):
            self._note(event)
        else:
            self._ask(event)

    def _note(self, event: str, is_unanimous: bool = True) -> None:
        self._last = (self._last[1], event)
        if event.startswith("trainable"):
            self.on_trainable(event.split()[2], is_unanimous)
        if event.startswith(self._pass_kinds):
            self._has_backward = True

    def _ask(self, event: str, is_learned: bool = True) -> None:
        """Agree with all ranks on the next collectives, and take part in them, until ``event`` is the next."""
        assert self._agreement is not None
        joined = ""
        while True:
            advice = self._advise(joined, event)
            decision = self._agreement.ask(Request(event, self._place, self._describe(event), self._failure, advice))
            if decision is None:  # others have run what was expected
                chosen = self._expect_after(self._last)
                assert chosen, self._last
            else:
                chosen = decision.event
                if is_learned:
                    self._learn(chosen, decision.is_unanimous)
            self._note(chosen, decision is None or decision.is_unanimous)
            if chosen == event:
                return
            if self._has_groups:
                self.expect_differences()
            self._join(chosen)
            joined = chosen

    def _learn(self, event: str, is_unanimous: bool) -> None:
        following, times_to_recur = self._next.get(self._last, (event, 0))
        self._next[self._last] = (event, max(0, times_to_recur - 1) if following == event else STABLE_COUNT - 1)
        if not is_unanimous:
            self._asking_steps = self._next_asking_steps
            self._next_asking_steps = min(2 * self._next_asking_steps, MAX_ASKING_STEPS)

    def _join(self, event: str) -> None:
        """Take part in what other ranks do and this one does not. An error becomes one of all ranks when it asks."""
        kind, unit, indices = _parse(event)
        if kind == "reduce":
            try:
                self._units[unit].join_reduction(indices)
            except ShardingError as error:
                self._failure = str(error)
        elif kind == "replicated":
            self.join_replicated()
        elif kind == "late":
            self.join_late()
        elif unit >= 0:
            self._units[unit].join_gather(indices)
            self.prefetch_next()

    def _decide(self, requests: Sequence[Request]) -> Decision:
        """Return what comes first of the things that ranks want, or why none can be chosen."""
        events, places = {request.event for request in requests}, {request.program_place for request in requests}
        failure = next((request.failure for request in requests if request.failure), "")
        if failure:
            return Decision("", error_message=failure)
        if len(events) == 1 and len(places) == 1:
            return Decision(events.pop())
        waiting = [event for event in events if _parse(event)[0] in _WAITING]
        joinable = [event for event in events if _parse(event)[0] in _JOINABLE]
        is_possible = len(places) == 1 and len(joinable) + len(waiting) == len(events) and len(waiting) < 2
        complete = [event for event in joinable if self._can_run(event, requests)]
        if is_possible and complete:
            return Decision(min(complete, key=_priority), is_unanimous=False)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, request in enumerate(requests):
            ranks_by_text.setdefault(request.description, []).append(rank)
        texts = [f"{_name_ranks(ranks)} {text}" for text, ranks in ranks_by_text.items()]
        advised = [request for request in requests if request.advice != ADVICE]  # the last unit comes first in backward
        advice = max(advised, key=lambda request: _parse(request.event)[1]).advice if advised else ADVICE
        return Decision(
            "", is_unanimous=False, error_message=f"ranks do different things: {'; '.join(texts)}. {advice}"
        )

    def _can_run(self, event: str, requests: Sequence[Request]) -> bool:
        _, unit, indices = _parse(event)
        ranks = [rank for rank, request in enumerate(requests) if request.event == event]
        return unit < 0 or self._units[unit].can_run(ranks, indices)

    def _advise(self, joined: str, event: str) -> str:
        """Say what to do if other ranks don't come to an event, or wait in the one that this rank has joined before."""
        for each in (joined, event):
            kind, unit, indices = _parse(each)
            if kind == "backward" and indices and self._units[unit].exchanges_gradients(indices):
                return _GRADIENT_ADVICE.format(self._units[unit].label)
        return ADVICE

    def _describe(self, event: str) -> str:
        kind, unit, indices = _parse(event)
        label = self._units[unit].describe(indices) if unit >= 0 else event.partition(" -1 ")[2]
        return f"{_TEXTS[kind][0].format(label)}, {self._place}"

    def _describe_past(self, event: str) -> str:
        kind, unit, _ = _parse(event)
        return _TEXTS[kind][1].format(self._units[unit].label if unit >= 0 else "")


def _parse(event: str) -> tuple[str, int, tuple[int, ...]]:
    """Return the kind of an event, the index of its unit (-1 without one), and those of its parameters."""
    kind, unit, rest = (*event.split(maxsplit=2), "", "", "")[:3]
    indices = tuple(int(index) for index in rest.split(",")) if rest and int(unit) >= 0 else ()
    return kind, int(unit or -1), indices


def _priority(event: str) -> tuple[int, int, str]:
    """Return a key that puts the first unit of the forward first, and the last one of the backward before others."""
    kind, unit, _ = _parse(event)
    order = _JOINABLE[kind]
    return order, -unit if order == 1 else unit, event


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks, the first of them {ranks[0]},"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
