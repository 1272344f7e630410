"""A unit's part in collectives that only other ranks need; see ``collective_order``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_osdp.engine.fairscale.collective_order import CollectiveOrder
from lightning_osdp.engine.fairscale.unit_collectives import reduce_zeros
from lightning_osdp.errors import ShardingError
from lightning_osdp.state.guarded_parameter import opened, without_guards


class JoinableUnit:
    """A unit that is registered in the order of collectives."""

    params: Any
    training_state: Any
    label: str
    _context: Any
    _coalesced_gather: Any
    _weight_slice: Any
    _in_graph: bool
    _finished: Any
    process_group_reduce_scatter: Any
    _use_stream: Any
    _lazy_init: Any
    _shards: Any
    _free_full_params: Any
    _post_reduction_hook: Any
    _inter_node_all_reduce: Any

    def _register(self, parameters: Sequence[nn.Parameter]) -> None:
        self._index = self._context.order.register(self)
        self.param_indices = {parameter: index for index, parameter in enumerate(parameters)}

    def describe(self, indices: Sequence[int]) -> str:
        """Return the label: gathers and reductions of some parameters are no reason for another one."""
        return self.label

    def join_gather(self, indices: Sequence[int], as_is: bool = False) -> None:
        """Take part in a gather that other ranks need, and free its result."""
        with without_guards(), self._use_stream("all_gather"):
            self._lazy_init()
            if self._coalesced_gather.is_started:  # on all ranks
                self._free_full_params()
                if not as_is:
                    return
            params = [self.params[index] for index in indices or range(len(self.params))]
            self._coalesced_gather.gather_and_free(self._shards(params, as_is))

    def exchanges_gradients(self, indices: Sequence[int]) -> bool:
        """See ``OrderedUnit.exchanges_gradients``."""
        return False

    def can_run(self, ranks: Collection[int], indices: Sequence[int]) -> bool:
        """Return True: any ranks are enough, since others take part with zeros."""
        return True

    def join_reduction(self, indices: Sequence[int]) -> None:
        """Contribute zero to gradients that other ranks have, and take this rank's part of the result.

        Raises:
            ShardingError: this rank has a gradient as well, and the parameters are updated before it comes.
        """
        params: list[Any] = [self.params[index] for index in indices]
        with without_guards(), self._use_stream("post_backward"):
            self._lazy_init()
            if self._weight_slice is not None:
                self._weight_slice.bind_gradient()
            own = [p._fp32_shard for p in params]
            shards = reduce_zeros(own, self.process_group_reduce_scatter, self._context.reducer.dtype)
            if self._context.update_in_backward and self._in_graph and not self._finished:
                raise ShardingError(
                    f"ranks run {self.label} in another order in their backward passes, but the plan updates it as "
                    "soon as one rank has its gradient: set OSDPStrategy(update_in_backward=False)"
                )
            state, self.training_state = self.training_state, type(self.training_state).BACKWARD_POST
            for parameter, shard in zip(params, shards, strict=True):
                if self._context.update_in_backward:
                    set_gradient_aside(parameter)
                    self._post_reduction_hook(parameter, shard)
                else:
                    self._add_joined_gradient(parameter, shard)
            self.training_state = state

    def _add_joined_gradient(self, parameter: Any, shard: Tensor) -> None:
        """Keep the gradient of other ranks apart: this rank's step may have yet to clear its gradients."""
        own = getattr(parameter, "_saved_grad_shard", None)
        parameter._saved_grad_shard = getattr(parameter, "_joined_grad_shard", None)
        self._post_reduction_hook(parameter, shard)
        parameter._joined_grad_shard, parameter._saved_grad_shard = parameter._saved_grad_shard, own

    def show_gradients(self) -> None:
        """Give the parameters their gradients when a backward pass is over."""
        for parameter in self.params:
            if getattr(parameter, "_saved_grad_shard", None) is not None:
                show_gradient(parameter)

    def show_joined_gradients(self) -> None:
        """Add the gradients of reductions that this rank has joined, when its step is over."""
        for parameter in self.params:
            shard = getattr(parameter, "_joined_grad_shard", None)
            if shard is None:
                continue
            if self._inter_node_all_reduce is not None:
                self._inter_node_all_reduce.wait_before_accumulation(parameter)
            with opened([parameter]):
                parameter.grad = shard if parameter.grad is None else parameter.grad.add_(shard)
            parameter._joined_grad_shard = None


def set_gradient_aside(parameter: Any) -> None:
    """Put an earlier gradient where FairScale adds the shard of the next one to it."""
    if parameter.grad is not None:
        parameter._saved_grad_shard, parameter.grad = parameter.grad.data, None


def show_gradient(parameter: Any) -> None:
    """Make the shard that FairScale has accumulated the parameter's gradient."""
    with opened([parameter]):
        parameter.grad, parameter._saved_grad_shard = parameter._saved_grad_shard, None


def before_reduction(order: CollectiveOrder, callbacks: Sequence[Any]) -> None:
    """Announce the reduction of gradients, each of which FairScale hands on with a bound, partial callback."""
    unit = callbacks[0].func.__self__
    order.before_reduction(unit._index, [unit.param_indices[callback.args[0]] for callback in callbacks])
