"""Memory along one training step, moment by moment: the peak, what makes it up, and where it is.

At each moment of the step the sum of

    states       parameters and optimizer states, whole (dp) or a part (zdp, zdp2), and buffers
    gradients    those that exist already: whole for dp, parts for sharded operators
    gathered     whole parameters of sharded operators that are there: of zdp while the operator runs, of zdp2 from
                 its forward to its backward
    transient    the whole gradient of the sharded operator that runs backward, the copy that its reduction makes,
                 the buckets of replicated gradients, the optimizer's temporaries
    activations  what was traced: tensors kept for backward and temporaries, at this batch size
    overhead     the process before the model

Gradients are freed after each optimizer step, so they are absent from the forward unless micro-batches accumulate.
Transients occur at one moment each: the peak is a maximum over moments, not their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.cost import ALONE_BYTES, BUCKET_BYTES, split_states
from lightning_osdp.planning.operators import OUTSIDE, ModelDescription
from lightning_osdp.planning.peak import explain_peak

Bytes = NDArray[np.float64]


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held, in bytes by category."""

    where: str
    """``forward of NAME``, ``backward of NAME``, ``optimizer step``."""
    states: float
    gradients: float
    gathered: float
    transient: float
    activations: float
    overhead: float

    @property
    def total_bytes(self) -> int:
        """Sum of all categories."""
        parts = (self.states, self.gradients, self.gathered, self.transient, self.activations, self.overhead)
        return round(sum(parts))


@dataclass(frozen=True)
class _Span:
    """When an operator runs, as indices of moments; backward is empty for one that gets no gradient."""

    forward: tuple[int, int]
    backward: tuple[int, int] | None


class Timeline:
    """The moments of one model, prepared once, to be asked for many plans.

    Args:
        model: the traced model.
        cluster: number of ranks and what a reduction copies.
        overhead_bytes: the process before the model.
    """

    def __init__(self, model: ModelDescription, cluster: Cluster, overhead_bytes: int) -> None:
        self._model = model
        self._cluster = cluster
        self._overhead = float(overhead_bytes)
        self._spans = _spans(model)

    @cached_property
    def _live(self) -> tuple[Bytes, Bytes]:
        fixed = np.array([moment.live.fixed for moment in self._model.moments], dtype=np.float64)
        slope = np.array([moment.live.per_sample for moment in self._model.moments], dtype=np.float64)
        return fixed, slope

    def peak(self, modes: Sequence[Mode], batch_size: int, accumulation: int = 1) -> Peak:
        """The largest sum along the step.

        Args:
            modes: one for each operator of the model.
            batch_size: samples per micro-batch.
            accumulation: micro-batches per optimizer step.
        """
        curves = self.curves(modes, batch_size, accumulation)
        total = sum(curves.values())
        assert isinstance(total, np.ndarray)
        worst = int(np.argmax(total))
        parts = {name: float(curve[worst]) for name, curve in curves.items()}
        return Peak(where=self._name_of(worst), **parts)

    def explain(self, modes: Sequence[Mode], batch_size: int, accumulation: int = 1) -> str:
        """What makes up the peak, and at which operator and phase it occurs, in words."""
        return explain_peak(self.peak(modes, batch_size, accumulation))

    def curves(self, modes: Sequence[Mode], batch_size: int, accumulation: int = 1) -> dict[str, Bytes]:
        """Bytes by category at each moment, the optimizer's step as one more moment at the end."""
        count = len(self._model.moments) + 1
        curves = {name: np.zeros(count) for name in ("states", "gradients", "gathered", "transient")}
        for operator, (mode, span) in enumerate(zip(modes, self._spans, strict=True)):
            self._add_operator(curves, operator, mode, span, accumulation)
        curves["states"] += self._model.buffer_bytes
        curves["transient"][-2:] += np.array([self._bucket_bytes(modes), self._optimizer_temporaries(modes)])[-count:]
        fixed, slope = self._live
        curves["activations"] = np.append(np.maximum(0.0, fixed + slope * batch_size), 0.0)
        curves["overhead"] = np.full(count, self._overhead)
        return curves

    def _add_operator(
        self, curves: dict[str, Bytes], operator: int, mode: Mode, span: _Span, accumulation: int
    ) -> None:
        ranks = self._cluster.ranks
        sharded, replicated = split_states(self._model.operators[operator], mode)
        states = sum(p.parameter_bytes + p.optimizer_bytes for p in replicated)
        states += sum(-(-(p.parameter_bytes + p.optimizer_bytes) // ranks) for p in sharded)
        curves["states"] += states
        whole = sum(p.parameter_bytes for p in sharded)
        whole_gradient = sum(p.gradient_bytes for p in sharded)
        part = whole_gradient / ranks
        (first, last), backward = span.forward, span.backward
        start, end = backward if backward is not None else (len(self._model.moments) - 1,) * 2
        curves["gradients"][start if accumulation == 1 else 0 :] += sum(p.gradient_bytes for p in replicated)
        curves["gradients"][end + 1 if accumulation == 1 else 0 :] += part
        if accumulation > 1:  # the new gradient stands beside the accumulated one until it is added
            curves["transient"][start : end + 1] += sum(p.gradient_bytes for p in replicated)
        if mode == Mode.ZDP2:
            curves["gathered"][first : end + 1] += whole
        elif mode == Mode.ZDP:
            curves["gathered"][first : last + 1] += whole
            if backward is not None:
                curves["gathered"][start : end + 1] += whole
        if backward is not None and whole_gradient:
            # The whole parameter is freed before its gradient is reduced to a part: the larger of the two counts.
            reduction = part + whole_gradient * self._cluster.reduce_copy
            curves["transient"][start : end + 1] += whole_gradient + max(0.0, reduction - whole)

    def _bucket_bytes(self, modes: Sequence[Mode]) -> float:
        """Buckets of replicated gradients, which stand beside the gradients themselves until the backward ends."""
        alone = ALONE_BYTES.get(self._cluster.device.split(":")[0], BUCKET_BYTES)
        packed = 0
        for operator, mode in zip(self._model.operators, modes, strict=True):
            _, replicated = split_states(operator, mode)
            packed += sum(p.gradient_bytes for p in replicated if p.gradient_bytes < alone)
        return float(packed) if self._cluster.ranks > 1 else 0.0

    def _optimizer_temporaries(self, modes: Sequence[Mode]) -> float:
        step, sizes = self._model.optimizer_step, [0.0]
        for operator, mode in zip(self._model.operators, modes, strict=True):
            sharded, replicated = split_states(operator, mode)
            sizes += [p.gradient_bytes for p in replicated]
            sizes += [p.gradient_bytes / self._cluster.ranks for p in sharded]
        return step.temporary_factor * (max(sizes) if step.of == "largest" else sum(sizes))

    def _name_of(self, index: int) -> str:
        if index == len(self._model.moments):
            return "optimizer step"
        moment = self._model.moments[index]
        if moment.operator == OUTSIDE:
            before = [m.operator for m in self._model.moments[:index] if m.operator != OUTSIDE]
            near = self._model.operators[before[-1]].name if before else "the start"
            return f"{moment.phase} after {near or 'the whole model'}"
        return f"{moment.phase} of {self._model.operators[moment.operator].name or 'the whole model'}"


def _spans(model: ModelDescription) -> list[_Span]:
    """First and last moment of each operator in forward and backward. One never traced counts as there throughout."""
    last = len(model.moments) - 1
    where: dict[tuple[int, str], list[int]] = {}
    for index, moment in enumerate(model.moments):
        where.setdefault((moment.operator, moment.phase), []).append(index)
    spans = []
    for operator in range(len(model.operators)):
        forward = where.get((operator, "forward"), [0, last])
        backward = where.get((operator, "backward"))
        spans.append(_Span((forward[0], forward[-1]), (backward[0], backward[-1]) if backward is not None else None))
    return spans
