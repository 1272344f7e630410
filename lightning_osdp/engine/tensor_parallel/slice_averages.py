"""Averages the gradients of slices over the ranks that hold the same one.

Note [during backward]: a gradient that is complete is taken from its parameter and averaged while the pass goes on.
Ranks do so in one order: that of the units that ran in the step before, the last one first; each waits for the one
before it. What was not ready (since a rank has not run it, or with whole weights) follows when the pass is over and
ranks have told each other how far they have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.backend.collectives import all_reduce_async
from lightning_osdp.backend.row_collectives import exchange_numbers
from lightning_osdp.backend.work import Work
from lightning_osdp.engine.gradient_buckets import GradientSync
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit
from lightning_osdp.state.autograd_state import is_in_backward
from lightning_osdp.state.guarded_parameter import opened, without_guards


@dataclass
class _Queue:
    """The slices of one degree, in the order in which they are averaged."""

    groups: TensorGroups
    weights: list[nn.Parameter] = field(default_factory=list)
    ready: set[nn.Parameter] = field(default_factory=set)
    started: list[tuple[nn.Parameter, Tensor, Work]] = field(default_factory=list)
    num_early: int = 0
    """How many of ``weights`` were started before the pass was over."""

    def advance(self) -> None:
        """Start what is ready, in order."""
        while self.num_early < len(self.weights) and self.weights[self.num_early] in self.ready:
            self.start(self.weights[self.num_early])
            self.num_early += 1

    def start(self, weight: nn.Parameter) -> None:
        """Take the gradient from a parameter, or zeros if it has none, and start to average it."""
        with torch.no_grad(), without_guards(), opened([weight]):
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.detach().contiguous()
            weight.grad = None
        self.started.append((weight, gradient, all_reduce_async(gradient, self.groups.replicas)))

    def finish(self, weights: Sequence[nn.Parameter]) -> None:
        """Average what is left of all gradients, and give them to their parameters. Collective.

        Args:
            weights: those that ran, beginning with ``self.weights``; the same on all ranks.
        """
        own = [self.num_early, *(int(weight.grad is not None) for weight in weights)]
        answers = exchange_numbers(own, self.groups.replica_hosts)
        most = max(num_early for num_early, *_ in answers)
        for weight in weights[self.num_early : most]:
            self.start(weight)
        for index, weight in enumerate(weights):
            # What a rank has besides a gradient that it has started early came from a further pass.
            if any(has[index] and (index >= most or index < num_early) for num_early, *has in answers):
                self.start(weight)
        for weight, gradient, work in self.started:
            work.wait()
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self.started, self.ready, self.num_early = [], set(), 0


class SliceAverages:
    """Averages the gradients of tensor parallel operators; see Note [during backward].

    Args:
        units: in the same order on all ranks.
        sync: while it is paused, each rank accumulates its own gradients.
    """

    def __init__(self, units: Sequence[TensorUnit], sync: GradientSync) -> None:
        self._units, self._sync = units, sync
        self._unit_of = {weight: unit for unit in units for weight in unit.layouts}
        self._queues = {unit.groups: _Queue(unit.groups) for unit in units if unit.groups.replicas.size() > 1}
        self._hooks: dict[nn.Parameter, Any] = {}
        self.refresh()

    def refresh(self) -> None:
        """Include parameters that were unfrozen. Cheap enough for every forward."""
        for weight, unit in self._unit_of.items():
            if weight not in self._hooks and weight.requires_grad and unit.groups in self._queues:
                with without_guards():
                    hook = weight.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks[weight] = hook

    def detach(self) -> None:
        """Stop averaging gradients during the backward pass, until ``refresh``."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, weight: nn.Parameter) -> None:
        unit = self._unit_of[weight]
        if self._sync.is_on and not unit.has_whole_runs:
            queue = self._queues[unit.groups]
            queue.ready.add(weight)
            queue.advance()

    def complete(self, finish_backward: Callable[[], None]) -> None:
        """Call ``finish_backward`` if slices on this rank have gradients of a pass that is over, but not complete."""
        is_waiting = any(queue.ready or queue.started for queue in self._queues.values())
        is_waiting = is_waiting or any(unit.has_whole_gradients for unit in self._units)
        if is_waiting and not is_in_backward():
            finish_backward()

    def finish(self, has_pass: bool, is_synced: bool) -> None:
        """Complete the gradients when a backward pass is over. Collective.

        Args:
            has_pass: whether there was a pass of any rank since the last call.
            is_synced: whether gradients are used, not accumulated on each rank.
        """
        has_pass |= any(unit.has_new_gradients for unit in self._units)
        units = [unit for unit in self._units if unit.has_run]
        with torch.no_grad(), opened(self._unit_of):
            for unit in units if has_pass else ():
                unit.reduce_whole_gradients()
                unit.is_unsynced = True
            unsynced = [unit for unit in units if unit.is_unsynced] if is_synced else []
            for groups, queue in self._queues.items():
                ran = [
                    w for unit in reversed(unsynced) if unit.groups == groups for w in unit.layouts if w in self._hooks
                ]
                if ran:
                    queue.finish(list(dict.fromkeys([*queue.weights, *ran])))
                    queue.weights = ran
        for unit in units:
            unit.has_new_gradients = False
        for unit in unsynced:
            unit.is_unsynced = False
