"""Why a plan is what it is, in words and as values. Reads nothing but plans.

The plan holds what the search saw: what each operator might have been and what that costs, and the price of memory at
the limit (the dual of the linear relaxation: seconds that one more byte would save). A choice pays if no other is
faster by more than the memory that it takes in addition is worth. Bytes are those at the moment of the plan's peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.operators import Frozen
from lightning_osdp.planning.peak import explain_peak
from lightning_osdp.planning.plan import BlockPlan, ChoiceCost, ExecutionPlan, FrontierPoint, OperatorPlan
from lightning_osdp.planning.runs import Run, choice_words, group_runs
from lightning_osdp.planning.schedule import THROUGHPUT_TOLERANCE
from lightning_osdp.planning.units import format_bytes, format_seconds

MODE_WORDS = {
    Mode.DP: "replicated",
    Mode.ZDP2: "sharded, gathered once a step",
    Mode.ZDP: "sharded, gathered twice a step",
}


class Reason(Frozen):
    """Why some operators have their mode."""

    operators: tuple[str, ...]
    """Patterns of their names, a range where a number counts up: ``blocks.0-7.qkv``."""
    mode: str
    count: int
    num_parameters: int
    text: str


class Explanation(Frozen):
    """A plan in words: whole sentences, one line each."""

    batch_size: str
    """Why not a smaller or a larger one."""
    memory: str
    """Where the peak is and what makes it up; empty if the plan does not say."""
    price: str
    """What memory is worth; empty if the plan does not say."""
    blocks: tuple[str, ...]
    """Of each kind of repeated block, how many are recomputed and why not more or fewer; empty if there are none."""
    operators: tuple[Reason, ...]

    def to_text(self) -> str:
        """All of it as paragraphs, the operators' as ``NAME: MODE. REASON``."""
        lines = [line for line in (self.batch_size, self.memory, self.price, *self.blocks) if line]
        lines += [f"{', '.join(reason.operators)}: {reason.mode}. {reason.text}".rstrip() for reason in self.operators]
        return "\n".join(lines)


def explain(plan: ExecutionPlan) -> str:
    """Why ``plan`` is what it is: its batch size, its peak, the price of memory, and the mode of each run of operators.

    A plan that was written by hand or by an earlier release may not hold the reasons; what can be said is said.
    """
    return explanation(plan).to_text()


def explanation(plan: ExecutionPlan) -> Explanation:
    """``explain`` as a value, for JSON."""
    reasons = [(run, _reason(plan, run)) for run in group_runs(plan.operators)]
    return Explanation(
        batch_size=_batch_size_text(plan),
        memory=_memory_text(plan),
        price=_price_text(plan),
        blocks=tuple(_block_texts(plan)),
        operators=tuple(_joined(reasons)),
    )


# -- the batch size and the memory -------------------------------------------------------------------------------------


def _batch_size_text(plan: ExecutionPlan) -> str:
    start = f"batch size {plan.batch_size}"
    end = plan.search_end
    if end is not None and end.reason == "fixed":
        return f"{start}: fixed, not searched."
    points = {point.batch_size: point for point in plan.frontier}
    if plan.batch_size not in points:
        return f"{start}: the plan does not say what else was tried."
    own, others = points[plan.batch_size], sorted(points)
    below = [size for size in others if size < plan.batch_size]
    sentences = [_compared(points[below[-1]], own)] if below else []
    best = max(plan.frontier, key=lambda point: point.samples_per_s)
    if best.batch_size > plan.batch_size:
        sentences.append(
            f"{_compared(best, own)}, within the tolerance of {THROUGHPUT_TOLERANCE:.0%}: larger batches amortise "
            "communication ever further, but the last percent is not worth fewer optimizer steps"
        )
    elif plan.batch_size != others[-1]:
        sentences.append(_compared(points[others[others.index(plan.batch_size) + 1]], own))
    return ". ".join([start, *sentences, _end_text(plan)]) + "."


def _compared(point: FrontierPoint, own: FrontierPoint) -> str:
    """``Batch size 8 would be 1.0% faster``, in samples per second."""
    share = point.samples_per_s / own.samples_per_s - 1
    if abs(share) < 5e-4:
        return f"Batch size {point.batch_size} would be as fast"
    return f"Batch size {point.batch_size} would be {abs(share):.1%} {'faster' if share > 0 else 'slower'}"


def _end_text(plan: ExecutionPlan) -> str:
    end, largest = plan.search_end, max(point.batch_size for point in plan.frontier)
    if end is None:
        return f"The largest tried was {largest}"
    if end.reason == "memory":
        needed = format_bytes(end.needed_bytes or 0)
        limit = format_bytes(plan.memory_limit_bytes)
        return f"Batch size {end.batch_size} does not fit: its smallest plan needs {needed} of {limit}"
    if end.reason == "maximum" and plan.keep_heap:
        return f"The largest tried where freed tensors stay in the heap is {end.batch_size}"
    if end.reason == "maximum":
        return f"The largest allowed is {end.batch_size}"
    return f"Larger ones than {largest} can't make the global batch size of {plan.global_batch_size}"


def _memory_text(plan: ExecutionPlan) -> str:
    used = format_bytes(plan.predicted.peak_memory_bytes)
    start = f"memory: {used} of {format_bytes(plan.memory_limit_bytes)}"
    peak = f", {explain_peak(plan.peak)}" if plan.peak is not None else ""
    between = [
        f" Between steps, {what} takes {format_bytes(size)}." for what, size in plan.predicted.between_steps.items()
    ]
    updates = ""
    if plan.update_in_backward:
        updates = (
            " Sharded parameters are updated in the backward pass: to keep their gradients for the optimizer's step "
            "would cost too much here."
        )
    kept = ""
    if plan.keep_heap:
        kept = (
            " Freed tensors stay in the heap, where the next ones find their pages: memory for that is left, and it "
            "saves the time in which the system clears new pages."
        )
    ahead = ""
    if plan.cluster.ahead_bytes:
        ahead = (
            f" Units of up to {format_bytes(plan.cluster.ahead_bytes)} are gathered and reduced beside compute, so "
            "that the next one's parameters are in memory as well, and the last one's gradients."
        )
    return f"{start}{peak}.{kept}{updates}{ahead}{''.join(between)}"


def _price_text(plan: ExecutionPlan) -> str:
    price = plan.price_s_per_byte
    if price is None:
        return ""
    if not price:
        return "price of memory: nothing. Every operator that may choose has its fastest mode."
    return f"price of memory: one more MiB would save about {format_seconds(price * (1 << 20))} a step."


# -- recomputed blocks -------------------------------------------------------------------------------------------------


def _block_texts(plan: ExecutionPlan) -> list[str]:
    """One line for each kind of block."""
    kinds: dict[tuple[str, str], list[BlockPlan]] = {}
    for block in plan.blocks:
        kinds.setdefault((block.kind, block.pinned), []).append(block)
    return [
        f"blocks of class {kind}: {_blocks_text(plan, blocks)}{_joined_text(blocks)}"
        for (kind, _), blocks in kinds.items()
    ]


def _joined_text(blocks: Sequence[BlockPlan]) -> str:
    """What it brings that operators share units; empty if none do. Starts with a blank."""
    joined = [block for block in blocks if block.joined]
    if not joined:
        return ""
    seconds, bytes_ = sum(block.joining_s for block in joined), max(block.joining_bytes for block in joined)
    return (
        f" Joined: in {len(joined)} of {len(blocks)}, {joined[0].joined} operators are gathered together, which "
        f"{'saves' if seconds >= 0 else 'costs'} {format_seconds(abs(seconds))} a step and takes "
        f"{format_bytes(abs(bytes_))} {'more' if bytes_ >= 0 else 'less'} at the peak."
    )


def _blocks_text(plan: ExecutionPlan, blocks: Sequence[BlockPlan]) -> str:
    again = [block for block in blocks if block.recomputed]
    if blocks[0].pinned:
        return f"none of {len(blocks)} recomputed: {blocks[0].pinned}."
    start = f"{len(again) or 'none'} of {len(blocks)} recomputed"
    if again:
        bytes_, seconds = sum(block.saved_bytes for block in again), sum(block.time_s for block in again)
        start += f" (up to {again[-1].name}), which frees {format_bytes(bytes_)} between forward and backward and "
        start += f"costs {format_seconds(seconds)} a step"
    if all(block.wished for block in blocks):
        return f"{start}, as was asked for."
    left = [block for block in blocks if not block.recomputed]
    if not left:
        return f"{start}."
    one = left[0]
    would = f"{'One more' if again else 'One'} would free {format_bytes(one.saved_bytes)} and cost "
    would += f"{format_seconds(one.time_s)} a step"
    price = plan.price_s_per_byte or 0.0
    if not price:
        return f"{start}. {would}, and memory is not scarce."
    worth = price * one.saved_bytes
    if worth > one.time_s:  # its own backward needs what it saves: a peak there stays
        return f"{start}. {would}, but no plan with it was found to be faster: it frees nothing while it runs backward."
    return f"{start}. {would}; at the price of memory those bytes are worth {format_seconds(worth)}."


# -- the operators -----------------------------------------------------------------------------------------------------


class _Exchange(NamedTuple):
    """What another choice would change for a run of operators; negative: less."""

    choice: Choice
    time_s: float
    bytes: int

    def loss_s(self, price: float) -> float:
        """What it loses, memory counted at its price."""
        return self.time_s + price * self.bytes


def _reason(plan: ExecutionPlan, run: Run) -> Reason:
    first = run.operators[0]
    text = _pinned_text(run) or _choice_text(plan, run)
    return Reason(
        operators=(run.pattern or "(the module itself)",),
        mode=_counted(first.choice) + ", joined" * bool(first.unit) + ", recomputed" * first.checkpoint,
        count=len(run.operators),
        num_parameters=run.num_parameters,
        text=text,
    )


def _pinned_text(run: Run) -> str:
    """Why there was nothing to choose; empty if there was, or if the plan does not say."""
    first = run.operators[0]
    if first.pinned:
        same = all(operator.pinned == first.pinned for operator in run.operators)
        return f"Stays replicated: {first.pinned if same else f'{first.name}: {first.pinned}'}."
    if len(first.alternatives) == 1:
        return "Stays replicated: its parameters are too small to be worth collectives of their own."
    return ""


def _choice_text(plan: ExecutionPlan, run: Run) -> str:
    first = run.operators[0]
    if first.unit and not first.alternatives:
        return "Shares the unit of its block, whose choice is told above."
    others = _exchanges(plan, run)
    if not others:
        return "The plan does not say why."
    price = plan.price_s_per_byte or 0.0
    best = min(others, key=lambda other: other.loss_s(price))
    number = len(run.operators)
    together = f", for {'both' if number == 2 else f'all {number}'} together," if number > 1 else ""
    room = plan.memory_limit_bytes - plan.predicted.peak_memory_bytes
    trade = _trade(best, price, room)
    shared = "One unit for the whole block; times and bytes are those of all in it. " if first.unit else ""
    text = f"{shared}{_role(run)}. Next best{together} is {_described(best.choice)}: it would {trade}."
    return text if first.unit else text + _split_text(run, others, best, price, room)


def _described(choice: Choice) -> str:
    """``zdp (sharded, gathered twice a step)``, ``4 slices (zdp x 4)``."""
    if choice.split_dim is None:
        return f"{choice_words(choice)} ({MODE_WORDS[choice.slices[0]]})"
    return _counted(choice)


def _counted(choice: Choice) -> str:
    """``zdp``, ``4 slices (zdp x 4)``."""
    words = choice_words(choice)
    return words if choice.split_dim is None else f"{len(choice.slices)} slices ({words})"


def _split_text(run: Run, others: Sequence[_Exchange], told: _Exchange, price: float, room: int) -> str:
    """Why the run is split or not, in so far as the next best choice does not say so; starts with a blank."""
    first, split = run.operators[0], run.operators[0].split_dim is not None
    opposite = [other for other in others if (other.choice.split_dim is not None) != split]
    if not split and not opposite:
        return f" Not split: {first.unsplittable}." if first.unsplittable else ""
    if not opposite or (told.choice.split_dim is not None) != split:
        return ""
    best = min(opposite, key=lambda other: other.loss_s(price))
    how = "Whole, as" if split else "In"
    return f" {how} {_described(best.choice)}, it would {_trade(best, price, room)}."


def _role(run: Run) -> str:
    """``Its fastest choice``, ``Its smallest choice``, or neither."""
    first = run.operators[0]
    own, costs = _cost_of(first, first.choice), first.alternatives
    assert own is not None, "only operators with exchanges have a role"
    if own.time_s <= min(cost.time_s for cost in costs):
        return "Its fastest choice"
    if own.resident_bytes + own.transient_bytes <= min(cost.resident_bytes + cost.transient_bytes for cost in costs):
        return "Its smallest choice"
    if own.resident_bytes <= min(cost.resident_bytes for cost in costs):
        return "Its smallest choice but for what it takes while it runs"
    return "Neither its fastest nor its smallest choice"


def _trade(other: _Exchange, price: float, room_bytes: int) -> str:
    """What an exchange would bring and cost, and whether that pays."""
    time, memory = format_seconds(abs(other.time_s)), format_bytes(abs(other.bytes))
    worth, rate = price * abs(other.bytes), f"{format_seconds(price * (1 << 20))} per MiB"
    under = f"at the price of memory under this limit ({rate})"
    whole = f"by the price of memory alone ({rate}) that would pay, but {_WHOLE}"
    if other.time_s >= 0 and other.bytes > -_NOTHING_BYTES:
        more = f"take {memory} more" if other.bytes >= _NOTHING_BYTES else "free no memory"
        return f"cost {time} a step more and {more}"
    if other.time_s >= 0:
        start = f"free {memory} but cost {time} a step"
        if not price:
            return f"{start}, and memory is not scarce"
        return f"{start}; " + (f"{under} that does not pay" if worth <= other.time_s * (1 + _CLOSE) else whole)
    if other.bytes <= 0:
        return f"save {time} a step, but no plan with it was found to fit at its peak"
    start = f"save {time} a step but take {memory} more"
    if worth > -other.time_s * (1 + _CLOSE):
        return f"{start}; {under} those bytes save more elsewhere"
    return f"{start}, and {format_bytes(room_bytes)} are left" if other.bytes > room_bytes else f"{start}; {whole}"


_WHOLE = "operators change as a whole and no exchange of whole ones gains"

_NOTHING_BYTES = 1 << 10
"""Less than this is rounding of shards to whole elements."""

_CLOSE = 1e-3
"""Relative: worths and costs this close are equal, as they are for the operator that sets the price."""


def _exchanges(plan: ExecutionPlan, run: Run) -> list[_Exchange]:
    """What each other choice would change if all of the run took it; empty if the plan does not say."""
    first = run.operators[0]
    if any(_cost_of(operator, operator.choice) is None for operator in run.operators):
        return []
    members = {operator.name for operator in run.operators}
    beside = max((cost.transient_bytes for cost in _chosen(plan.operators, members)), default=0)

    def cost(choice: Choice) -> tuple[float, int] | None:
        costs = [_cost_of(operator, choice) for operator in run.operators]
        known = [one for one in costs if one is not None]
        if len(known) < len(costs):
            return None
        largest = max(beside, *(one.transient_bytes for one in known))
        return sum(one.time_s for one in known), sum(one.resident_bytes for one in known) + largest

    own = cost(first.choice)
    others = {alternative.choice: cost(alternative.choice) for alternative in first.alternatives}
    return [
        _Exchange(choice, other[0] - own[0], other[1] - own[1])
        for choice, other in others.items()
        if other is not None and own is not None and choice != first.choice
    ]


def _cost_of(operator: OperatorPlan, choice: Choice) -> ChoiceCost | None:
    return next((cost for cost in operator.alternatives if cost.choice == choice), None)


def _chosen(operators: Iterable[OperatorPlan], without: set[str]) -> list[ChoiceCost]:
    """The costs of what the other operators are."""
    found = [_cost_of(operator, operator.choice) for operator in operators if operator.name not in without]
    return [cost for cost in found if cost is not None]


def _joined(reasons: Sequence[tuple[Run, Reason]]) -> list[Reason]:
    """Reasons of the same text and mode as one, but not where the text counts a run's operators together."""
    groups: dict[tuple[str, ...], list[Reason]] = {}
    for run, reason in reasons:
        counted = len(run.operators) > 1 and not _pinned_text(run)
        groups.setdefault((reason.mode, reason.text, *(reason.operators if counted else ())), []).append(reason)
    return [
        Reason(
            operators=tuple(name for reason in group for name in reason.operators),
            mode=group[0].mode,
            count=sum(reason.count for reason in group),
            num_parameters=sum(reason.num_parameters for reason in group),
            text=group[0].text,
        )
        for group in groups.values()
    ]
