"""What the units of one engine share: communicators, streams, the order of gathers, and running backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale_module

from lightning_osdp.backend.hierarchical import cached_group_copy
from lightning_osdp.backend.streams import GatherMemory, ReductionMemory, create_streams
from lightning_osdp.engine.fairscale.collective_order import CollectiveOrder
from lightning_osdp.engine.fairscale.communicators import CommunicatorFactory, sharded_operators
from lightning_osdp.engine.fairscale.joinable_unit import before_reduction
from lightning_osdp.engine.fairscale.kept_views import KeptViews
from lightning_osdp.engine.fairscale.unit_collectives import GradientReducer
from lightning_osdp.engine.gradient_buckets import GradientSync
from lightning_osdp.engine.optimizer_in_backward import BackwardOptimizer
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state.autograd_state import is_in_backward, is_other_thread
from lightning_osdp.state.guarded_parameter import GuardContext, without_guards
from lightning_osdp.state.refused_tracing import refuse_tracing

REDUCE_DTYPES: dict[str, torch.dtype | None] = {"": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types in which gradients are reduced, by their names in plans."""

STREAM_NAMES = ("fp32_to_fp16", "all_gather", "post_backward")
"""Names under which FairScale looks its streams up."""


class _Unit(Protocol):
    def finish_pass(self) -> None: ...

    def reshard(self) -> None: ...


class _BackwardPasses:
    """Calls the units that a backward pass has reached when it is over."""

    def __init__(self, reducer: GradientReducer, streams: Mapping[str, Any]) -> None:
        self._reducer, self._streams = reducer, streams
        self._units: dict[int, list[_Unit]] = {}
        self.on_end: Callable[[], None] = lambda: None
        """Called when no pass is running any more."""

    def join(self, number: int, unit: _Unit) -> None:
        """Call ``unit.finish_pass`` at the end of the pass that is running, which has this number."""
        if number not in self._units:
            self._units[number] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, number))
        self._units[number].append(unit)

    def _end(self, number: int) -> None:
        cuda = fairscale_module.torch.cuda
        with without_guards():
            with cuda.stream(self._streams["post_backward"]):
                self._reducer.flush()
            cuda.current_stream().wait_stream(self._streams["post_backward"])
            self._reducer.memory.free_all()
            for unit in self._units.pop(number):
                unit.finish_pass()
            if not self.is_running and torch._C._current_autograd_node() is None:
                self.on_end()

    @property
    def is_running(self) -> bool:
        """Return whether a pass that has reached a unit is not over."""
        return bool(self._units)

    def discard(self) -> None:
        """End passes that an exception has ended."""
        with without_guards():
            while self._units:
                for unit in self._units.popitem()[1]:
                    unit.finish_pass()
                    unit.reshard()


class EngineContext:
    """What all units of one engine share.

    Args:
        device: where this rank computes.
        group: all ranks.
        plan: the plan that the engine carries out.
    """

    def __init__(self, device: torch.device, group: Any, plan: ExecutionPlan) -> None:
        self.device = device
        # Replicated gradients need a group of their own: their order is fixed, that of the units' collectives follows
        # autograd.
        self.replica_group = cached_group_copy(group, "replicas")
        self.parameters_changed = True
        self.params_summoned = False
        self.why_no_runs = ""  # set when a run is over and the module stays sharded
        self.owner: object = None  # the engine, which lives as long as the module is sharded
        self.update_in_backward = plan.update_in_backward
        self.sync = GradientSync()
        self.backward_optimizer = BackwardOptimizer(self.sync)
        self.order = CollectiveOrder(group)
        self.guards = GuardContext(group, plan.update_in_backward)
        self.views = KeptViews()
        self.guards.before_access = self.order.before_access
        choices = [operator.choice for operator in sharded_operators(plan)]
        self.communicator_factory = CommunicatorFactory(group, device, choices, plan.cluster, self.sync)
        self.streams = create_streams(device, STREAM_NAMES, fairscale_module)
        gathers, reductions = (self.streams[name] if device.type == "cuda" else None for name in STREAM_NAMES[1:])
        self.gather_memory = GatherMemory(gathers)
        self.reducer = GradientReducer(
            partial(before_reduction, self.order), ReductionMemory(reductions), REDUCE_DTYPES[plan.reduce_dtype]
        )
        self.backward_passes = _BackwardPasses(self.reducer, self.streams)

    def end_broken_passes(self) -> None:
        """End backward passes that an exception has ended, which the user may have caught."""
        if self.backward_passes.is_running and not is_in_backward():
            self.reducer.discard()
            self.backward_passes.discard()
            self.backward_passes.on_end()

    def check_run(self) -> None:
        """Refuse to run a module that must not run now, and end passes that left it in the middle.

        Raises:
            ShardingError: its run is over, its parameters are shown whole, it is traced, or a CUDA graph is captured.
        """
        refuse_tracing()
        self.end_broken_passes()
        if self.why_no_runs:
            raise ShardingError(self.why_no_runs)
        if is_other_thread(self.guards.thread):
            raise ShardingError(
                "a sharded operator runs in another thread than the one that trains, where its gathers would come in "
                "another order on each rank: run it in the thread of the Trainer"
            )
        if self.params_summoned:
            raise ShardingError("the model can't run while its parameters are shown whole: leave that context first")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ShardingError(
                "sharded operators can't be captured in a CUDA graph: what they gather has another place in each step. "
                "Capture modules that stay replicated (OSDPCallback(modes=...)), or none"
            )
