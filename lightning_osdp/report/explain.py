"""Explain why a plan is what it is, in words and as values. Reads nothing but plans.

A plan holds the alternatives of each operator with their costs, and the shadow price of memory at the limit (the dual
of the linear relaxation: seconds that one more byte would save). A choice pays if no other choice saves more time than
its additional memory is worth. Bytes are counted at the moment of the plan's peak.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_osdp.errors import check_kind
from lightning_osdp.planning.cost.peak_text import explain_peak
from lightning_osdp.planning.search.batch_size_search import THROUGHPUT_TOLERANCE
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.constraints import NO_TENSOR_KIND
from lightning_osdp.planning.spec.formatting import format_bytes, format_seconds
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.plan import BlockPlan, ExecutionPlan
from lightning_osdp.planning.spec.search_record import BatchSizePoint
from lightning_osdp.report.baseline_text import describe_baseline
from lightning_osdp.report.choice_deltas import ChoiceDelta, choice_deltas, find_cost
from lightning_osdp.report.operator_runs import (
    MODE_DESCRIPTIONS,
    OperatorRun,
    describe_choice,
    describe_tried,
    group_runs,
)

_TOO_SMALL = "its parameters are too small to be worth collectives of their own"


class Reason(FrozenModel):
    """The reason why some operators have their mode; ``operators`` are patterns of names such as ``blocks.0-7.qkv``."""

    operators: tuple[str, ...]
    mode: str
    count: int
    num_parameters: int
    text: str


class Explanation(FrozenModel):
    """A plan in words: complete sentences, one line each; empty where the plan does not say.

    Attributes:
        batch_size: why the batch size is neither smaller nor larger.
        tried: what each of the plans took that were tried.
        memory: where the peak is and what makes it up.
        price: what memory is worth.
        blocks: for each kind of repeated block, how many are recomputed and why not more or fewer.
        operators: why each run of operators has its mode.
        baselines: what DDP, ZeRO-2 and FSDP would do instead.
    """

    batch_size: str
    memory: str
    price: str
    blocks: tuple[str, ...]
    operators: tuple[Reason, ...]
    tried: str = ""
    baselines: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Format the explanation as paragraphs, those of operators as ``NAME: MODE. REASON``."""
        general = (self.batch_size, self.tried, *self.baselines, self.memory, self.price, *self.blocks)
        lines = [line for line in general if line]
        lines += [f"{', '.join(reason.operators)}: {reason.mode}. {reason.text}".rstrip() for reason in self.operators]
        return "\n".join(lines)


def explain(plan: ExecutionPlan) -> str:
    """Explain a plan: its batch size, its peak, the price of memory, and the mode of each run of operators.

    A plan that was written by hand may not hold the reasons; the explanation says what it can.
    """
    return build_explanation(plan).to_text()


def build_explanation(plan: ExecutionPlan) -> Explanation:
    """Explain a plan as a value that can be written as JSON."""
    check_kind("explain()", plan, ExecutionPlan, "an ExecutionPlan")
    reasons = [(run, _explain_run(plan, run)) for run in group_runs(plan.operators)]
    return Explanation(
        batch_size=_batch_size_text(plan),
        memory=_memory_text(plan),
        price=_price_text(plan),
        blocks=tuple(_block_kind_texts(plan)),
        operators=tuple(_merge_reasons(reasons)),
        tried=_tried_text(plan),
        baselines=tuple(describe_baseline(plan, baseline) for baseline in plan.baselines),
    )


# -- the batch size and the memory -------------------------------------------------------------------------------------


def _batch_size_text(plan: ExecutionPlan) -> str:
    start = f"batch size {plan.batch_size}"
    if plan.search_stop is not None and plan.search_stop.reason == "fixed":
        return f"{start}: fixed, not searched."
    points = {point.batch_size: point for point in plan.frontier}
    if plan.batch_size not in points:
        return f"{start}: the plan does not say what else was tried."
    own, others = points[plan.batch_size], sorted(points)
    below = [size for size in others if size < plan.batch_size]
    sentences = [_comparison_text(points[below[-1]], own)] if below else []
    best = max(plan.frontier, key=lambda point: point.samples_per_s)
    if best.batch_size > plan.batch_size:
        sentences.append(
            f"{_comparison_text(best, own)}, within the tolerance of {THROUGHPUT_TOLERANCE:.0%}: larger batches "
            "amortise communication ever further, but the last percent is not worth fewer optimizer steps"
        )
    elif plan.batch_size != others[-1]:
        sentences.append(_comparison_text(points[others[others.index(plan.batch_size) + 1]], own))
    return ". ".join([start, *sentences, _search_stop_text(plan)]) + "."


def _tried_text(plan: ExecutionPlan) -> str:
    if not plan.tried:
        return ""
    rounds = max(one.num_rounds for one in plan.tried)
    rule = " The simplest is taken unless another one is faster by more than rounds differ." if plan.tried[1:] else ""
    return f"Tried in turns ({rounds} rounds): a step took {describe_tried(plan)}.{rule}"


def _comparison_text(point: BatchSizePoint, own: BatchSizePoint) -> str:
    share = point.samples_per_s / own.samples_per_s - 1
    if abs(share) < 5e-4:
        return f"Batch size {point.batch_size} would be as fast"
    return f"Batch size {point.batch_size} would be {abs(share):.1%} {'faster' if share > 0 else 'slower'}"


def _search_stop_text(plan: ExecutionPlan) -> str:
    stop, largest = plan.search_stop, max(point.batch_size for point in plan.frontier)
    if stop is None:
        return f"The largest tried was {largest}"
    if stop.reason == "memory":
        needed = format_bytes(stop.needed_bytes or 0)
        limit = format_bytes(plan.memory_limit_bytes)
        return f"Batch size {stop.batch_size} does not fit: its smallest plan needs {needed} of {limit}"
    if stop.reason == "maximum":
        return f"The largest allowed is {stop.batch_size}{f' (by {stop.setting})' * bool(stop.setting)}"
    return f"Larger ones than {largest} can't make the global batch size of {plan.global_batch_size}"


def _memory_text(plan: ExecutionPlan) -> str:
    used = format_bytes(plan.predicted.peak_memory_bytes)
    start = f"memory: {used} of {format_bytes(plan.memory_limit_bytes)}"
    peak = f", {explain_peak(plan.peak)}" if plan.peak is not None else ""
    non_training = "".join(
        f" Between steps, {what} takes {format_bytes(size)}."
        for what, size in plan.predicted.non_training_bytes.items()
    )
    updates = ""
    if plan.update_in_backward:
        updates = (
            " Sharded parameters are updated during backward: to store their gradients until the optimizer's step "
            "would cost too much here."
        )
    retained = ""
    if plan.retain_freed_memory:
        retained = (
            " Freed memory is retained in the heap: there is room for it, and new tensors find their pages "
            "there, which saves the time in which the system clears new pages."
        )
    prefetch = ""
    if plan.cluster.prefetch_max_bytes:
        prefetch = (
            f" Units of up to {format_bytes(plan.cluster.prefetch_max_bytes)} are prefetched and reduced during "
            "compute, so the parameters of the next unit and the gradients of the last one are in memory as well."
        )
    return f"{start}{peak}.{retained}{updates}{prefetch}{non_training}"


def _price_text(plan: ExecutionPlan) -> str:
    price = plan.memory_shadow_price
    if price is None:
        return ""
    if not price:
        deltas = [delta for run in group_runs(plan.operators) for delta in choice_deltas(plan, run)]
        if all(delta.time_s >= 0 for delta in deltas):
            return "price of memory: nothing. Every operator that may choose has its fastest mode."
        return "price of memory: nothing for one more MiB. What would save time needs more, or was slower in trials."
    return f"price of memory: one more MiB would save about {format_seconds(price * (1 << 20))} a step."


# -- recomputed blocks -------------------------------------------------------------------------------------------------


def _block_kind_texts(plan: ExecutionPlan) -> list[str]:
    kinds: dict[tuple[str, str], list[BlockPlan]] = {}
    for block in plan.blocks:
        kinds.setdefault((block.kind, block.recompute_blocker), []).append(block)
    return [
        f"blocks of class {kind}: {_recompute_text(plan, blocks)}{_wrapping_text(blocks)}"
        for (kind, _), blocks in kinds.items()
    ]


def _wrapping_text(blocks: Sequence[BlockPlan]) -> str:
    """Say what it brings to wrap whole blocks as units; empty if none is wrapped. Starts with a blank."""
    wrapped = [block for block in blocks if block.num_wrapped]
    if not wrapped:
        return ""
    seconds, bytes_ = sum(block.wrapping_saves_s for block in wrapped), max(block.wrapping_bytes for block in wrapped)
    more = f"{format_bytes(abs(bytes_))} {'more' if bytes_ > 0 else 'less'}" if bytes_ else "no more"
    return (
        f" Per block: in {len(wrapped)} of {len(blocks)}, {wrapped[0].num_wrapped} operators are gathered together, "
        f"which {'saves' if seconds >= 0 else 'costs'} {format_seconds(abs(seconds))} a step and takes "
        f"{more} at the peak."
    )


def _recompute_text(plan: ExecutionPlan, blocks: Sequence[BlockPlan]) -> str:
    recomputed = [block for block in blocks if block.recomputed]
    if blocks[0].recompute_blocker:
        return f"none of {len(blocks)} recomputed: {blocks[0].recompute_blocker}."
    start = f"{len(recomputed) or 'none'} of {len(blocks)} recomputed"
    if recomputed:
        bytes_, seconds = (
            sum(block.recompute_saves_bytes for block in recomputed),
            sum(block.time_s for block in recomputed),
        )
        is_start = recomputed == list(blocks[: len(recomputed)])
        which = f"up to {recomputed[-1].name}" if is_start else ", ".join(block.name for block in recomputed)
        start += f" ({which}), which frees {format_bytes(bytes_)} between forward and backward and "
        start += f"costs {format_seconds(seconds)} a step"
    if all(block.user_requested for block in blocks):
        return f"{start}, as you asked for."
    left = [block for block in blocks if not block.recomputed]
    if not left:
        return f"{start}."
    candidate = left[0]
    would = (
        f"{'One more' if recomputed else 'One'} would free {format_bytes(candidate.recompute_saves_bytes)} and cost "
    )
    would += f"{format_seconds(candidate.time_s)} a step"
    price = plan.memory_shadow_price or 0.0
    if not price:
        return f"{start}. {would}, and memory is not scarce."
    worth = price * candidate.recompute_saves_bytes
    if worth > candidate.time_s:  # its own backward needs what it saves: a peak there stays
        return f"{start}. {would}, but no plan with it was found to be faster: it frees nothing while it runs backward."
    return f"{start}. {would}; at the price of memory those bytes are worth {format_seconds(worth)}."


# -- the operators -----------------------------------------------------------------------------------------------------


def _explain_run(plan: ExecutionPlan, run: OperatorRun) -> Reason:
    first = run.operators[0]
    text = _requested_text(run) or _replicated_text(run) or _choice_text(plan, run)
    return Reason(
        operators=(run.label,),
        mode=_describe_choice_and_slices(first.choice)
        + ", per block" * bool(first.unit)
        + ", recomputed" * first.is_recomputed,
        count=len(run.operators),
        num_parameters=run.num_parameters,
        text=text,
    )


def _requested_text(run: OperatorRun) -> str:
    """Say that the user chose the mode, or why it could not be had; empty if it was left to the search."""
    first = run.operators[0]
    if first.requested_mode is None:
        return ""
    if first.requested_mode == Mode.TP:
        if first.tensor is not None:
            return f"As you wished: OSDPCallback asks for it. {_exchange_text(run)}."
        reason = first.tensor_refusal or first.replicated_reason or NO_TENSOR_KIND
        return f"OSDPCallback asks for tp, which is not possible: {reason}."
    if set(first.slices) == {first.requested_mode}:
        return "As you wished: OSDPCallback(modes=...) asks for it."
    reason = first.replicated_reason or _TOO_SMALL
    if set(first.slices) != {Mode.DP}:
        reason = "it is used several times in a step, so it is gathered once"
    return f"OSDPCallback(modes=...) asks for {first.requested_mode}, which is not possible: {reason}."


def _replicated_text(run: OperatorRun) -> str:
    """Say why there was nothing to choose; empty if there was a choice, or if the plan does not say."""
    first = run.operators[0]
    if first.replicated_reason:
        same = all(operator.replicated_reason == first.replicated_reason for operator in run.operators)
        return f"Stays replicated: {first.replicated_reason if same else f'{first.name}: {first.replicated_reason}'}."
    if len(first.alternatives) == 1:
        return f"Stays replicated: {_TOO_SMALL}."
    return ""


def _choice_text(plan: ExecutionPlan, run: OperatorRun) -> str:
    first = run.operators[0]
    if first.unit and not first.alternatives:
        return "Shares the unit of its block, whose choice is explained above."
    others = choice_deltas(plan, run)
    if not others:
        return "The plan does not say why."
    price = plan.memory_shadow_price or 0.0
    best = min(others, key=lambda other: other.loss_s(price))
    number = len(run.operators)
    together = f", for {'both' if number == 2 else f'all {number}'} together," if number > 1 else ""
    free_bytes = plan.memory_limit_bytes - plan.predicted.peak_memory_bytes
    trade = _tradeoff_text(best, price, free_bytes)
    shared = "One unit for the whole block; times and bytes are those of all in it. " if first.unit else ""
    text = (
        f"{shared}{_role_text(run)}. Next best{together} is {_describe_choice_and_mode(best.choice)}: it would {trade}."
    )
    if first.unit:
        return text
    details = (run, others, best, price, free_bytes)
    return text + _split_text(*details) + _tensor_text(*details)


def _describe_choice_and_mode(choice: ShardingChoice) -> str:
    """Describe a choice as ``zdp (sharded, gathered twice a step)`` or ``4 slices (zdp x 4)``."""
    if choice.split_dim is None:
        return f"{describe_choice(choice)} ({MODE_DESCRIPTIONS[choice.slices[0]]})"
    return _describe_choice_and_slices(choice)


def _describe_choice_and_slices(choice: ShardingChoice) -> str:
    words = describe_choice(choice)
    return words if choice.split_dim is None else f"{len(choice.slices)} slices ({words})"


def _split_text(
    run: OperatorRun, others: Sequence[ChoiceDelta], reported: ChoiceDelta, price: float, available_bytes: int
) -> str:
    """Say why the run is split or not, unless the next best choice says so; starts with a blank."""
    first, split = run.operators[0], run.operators[0].split_dim is not None
    opposite = [other for other in others if (other.choice.split_dim is not None) != split]
    if not split and not opposite:
        return f" Not split: {first.unsplittable_reason}." if first.unsplittable_reason else ""
    if not opposite or (reported.choice.split_dim is not None) != split:
        return ""
    best = min(opposite, key=lambda other: other.loss_s(price))
    how = "Whole, as" if split else "In"
    return f" {how} {_describe_choice_and_mode(best.choice)}, it would {_tradeoff_text(best, price, available_bytes)}."


def _exchange_text(run: OperatorRun) -> str:
    """Say what a tensor parallel run of operators exchanges, and how much that is."""
    activations, weights = (
        format_bytes(sum(getattr(operator, name) for operator in run.operators))
        for name in ("activation_bytes", "weight_bytes")
    )
    return f"Exchanges activations ({activations} a micro-batch) instead of weights ({weights})"


def _tensor_text(
    run: OperatorRun, others: Sequence[ChoiceDelta], reported: ChoiceDelta, price: float, available_bytes: int
) -> str:
    """Say why the run is not tensor parallel, unless the next best choice says so; starts with a blank."""
    first = run.operators[0]
    if first.tensor_refusal:
        return f" Not tensor parallel: {first.tensor_refusal}."
    refusal = f" Not tensor parallel {first.tensor_group_refusal}." if first.tensor_group_refusal else ""
    cut = [other for other in others if other.choice.tensor_degree > 1]
    if first.tensor is not None or not cut or reported.choice.tensor_degree > 1:
        return refusal
    best, trade = min(cut, key=lambda other: other.loss_s(price)), (price, available_bytes)
    return f" As {_describe_choice_and_mode(best.choice)}, it would {_tradeoff_text(best, *trade)}.{refusal}"


def _role_text(run: OperatorRun) -> str:
    first = run.operators[0]
    if first.tensor is not None:
        return _exchange_text(run)
    own, costs = find_cost(first, first.choice), first.alternatives
    assert own is not None, "only operators with alternatives have a role"
    if own.time_s <= min(cost.time_s for cost in costs):
        return "Its fastest choice"
    if own.resident_bytes + own.transient_bytes <= min(cost.resident_bytes + cost.transient_bytes for cost in costs):
        return "Its smallest choice"
    if own.resident_bytes <= min(cost.resident_bytes for cost in costs):
        return "Its smallest choice but for what it takes while it runs"
    return "Neither its fastest nor its smallest choice"


def _tradeoff_text(other: ChoiceDelta, price: float, available_bytes: int) -> str:
    """Say what another choice would save and cost, and whether that pays."""
    time, memory = format_seconds(abs(other.time_s)), format_bytes(abs(other.memory_bytes))
    worth, rate = price * abs(other.memory_bytes), f"{format_seconds(price * (1 << 20))} per MiB"
    under = f"at the price of memory under this limit ({rate})"
    if other.time_s >= 0 and other.memory_bytes > -_BYTES_TOLERANCE:
        more = f"take {memory} more" if other.memory_bytes >= _BYTES_TOLERANCE else "free no memory"
        return f"cost {time} a step more and {more}"
    if other.time_s >= 0:
        start = f"free {memory} but cost {time} a step"
        if not price:
            return f"{start}, and memory is not scarce"
        pays = worth > other.time_s * (1 + _VALUE_TOLERANCE)
        return f"{start}; " + ("what else those bytes allow saves less" if pays else f"{under} that does not pay")
    if other.memory_bytes <= 0:
        return f"save {time} a step, but no plan with it was found to fit at its peak"
    start = f"save {time} a step but take {memory} more"
    if worth > -other.time_s * (1 + _VALUE_TOLERANCE):
        return f"{start}; {under} those bytes save more elsewhere"
    if other.memory_bytes > available_bytes:
        return f"{start}, and {format_bytes(available_bytes)} are left"
    return f"{start} at the peak; there is room for that, but not at another moment, or it was slower in trials"


_BYTES_TOLERANCE = 1 << 10
"""Differences below this many bytes come from rounding shards to whole elements."""

_VALUE_TOLERANCE = 1e-3
"""Relative difference below which worth and cost are equal, as they are for the operator that sets the price."""


def _merge_reasons(reasons: Sequence[tuple[OperatorRun, Reason]]) -> list[Reason]:
    """Merge reasons with the same text and mode, but not where the text counts the operators of a run together."""
    groups: dict[tuple[str, ...], list[Reason]] = {}
    for run, reason in reasons:
        counted = len(run.operators) > 1 and not (_requested_text(run) or _replicated_text(run))
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
