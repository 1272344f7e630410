"""What else there was instead of a plan, and what the plan gains over it, in words."""

from __future__ import annotations

from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import Baseline

MAX_DRIFT = 0.1
"""Relative difference of measured and predicted throughput above which the machine is taken to have another speed than
when plans were compared: the gain is then that between predictions."""


def format_throughput(samples_per_s: float) -> str:
    """Return a throughput without its unit: ``1,234.5`` or ``0.123``."""
    return f"{samples_per_s:,.1f}" if samples_per_s >= 1 else f"{samples_per_s:.3f}"


def baseline_cells(plan: ExecutionPlan, baseline: Baseline) -> tuple[str, str, str, str]:
    """Return the cells of a baseline in a table: its name, batch size, samples/s, and the gain of the plan over it."""
    size, rate = str(baseline.batch_size), format_throughput(baseline.samples_per_s)
    if not baseline.fits:
        return baseline.name, "", "does not fit", f"needs {format_bytes(baseline.missing_bytes)} more"
    if baseline.is_uncertain:
        return baseline.name, size, "not tried", "none sure"
    gain = f"{_gain(plan.predicted.samples_per_s, baseline):+.1%}{', tried' * baseline.is_tried}"
    return baseline.name, size, rate, "this plan" if baseline.is_plan else gain


def describe_baseline(plan: ExecutionPlan, baseline: Baseline) -> str:
    """Say what a baseline would do instead of the plan, in a sentence."""
    start = f"instead, {baseline.name}"
    if baseline.is_plan:
        return f"{start}: that is what this plan does."
    if not baseline.fits:
        return f"{start}: does not fit, {format_bytes(baseline.missing_bytes)} are missing at the smallest batch size."
    start += f" at batch size {baseline.batch_size}"
    if baseline.is_uncertain:
        return f"{start}: is predicted to be no slower, but was not tried as this plan was."
    gain = _gain(plan.predicted.samples_per_s, baseline)
    than = "as fast as this plan" if abs(gain) < 5e-4 else f"this plan is {abs(gain):.1%} {_comparative(gain)}"
    return f"{start}: {format_throughput(baseline.samples_per_s)} samples/s {_how_known(baseline)}, {than}."


def describe_gain(plan: ExecutionPlan, samples_per_s: float) -> str:
    """Say what is gained over the best baseline by the throughput that was measured; empty if the plan has none."""
    fitting = [baseline for baseline in plan.baselines if baseline.fits]
    if not plan.baselines:
        return ""
    missing = [baseline for baseline in plan.baselines if not baseline.fits]
    if not fitting:
        least = min(missing, key=lambda baseline: baseline.missing_bytes)
        need = f"{least.name} needs least, and {format_bytes(least.missing_bytes)} more than there is"
        return f"Gained: the training itself. Nothing else fits: {need}."
    end = f" {missing[0].name} does not fit: {format_bytes(missing[0].missing_bytes)} are missing." if missing else ""
    best = max(fitting, key=lambda baseline: (baseline.samples_per_s, baseline.is_uncertain, baseline.is_plan))
    if best.is_plan:
        return f"This plan is {best.name}: the fastest of what there was.{end}"
    if best.is_uncertain:
        return f"No gain is sure over {best.name}: it is predicted to be no slower, but was not tried.{end}"
    drift = samples_per_s / plan.predicted.samples_per_s - 1 if plan.predicted.samples_per_s else 0.0
    if abs(drift) > MAX_DRIFT:
        samples_per_s = plan.predicted.samples_per_s
        end = f" The machine was {_comparative(drift)} than when this was compared.{end}"
    gain = _gain(samples_per_s, best)
    over = f"over {best.name}, the best of what else there was"
    rate = f"{format_throughput(best.samples_per_s)} samples/s {_how_known(best)}, at batch size {best.batch_size}"
    return f"{f'Gained: {gain:.1%}' if gain >= 5e-4 else 'Nothing gained'} {over} ({rate}).{end}"


def _gain(samples_per_s: float, baseline: Baseline) -> float:
    return samples_per_s / baseline.samples_per_s - 1 if baseline.samples_per_s else 0.0


def _comparative(gain: float) -> str:
    return "faster" if gain > 0 else "slower"


def _how_known(baseline: Baseline) -> str:
    return "when tried" if baseline.is_tried else "by prediction"
