"""Units: what is gathered and freed at once, each a FairScale FullyShardedDataParallel. The only file that imports it.

Note [the module tree is left alone]: FairScale's wrapper usually replaces a module in its parent, which changes
names, classes and state dict keys. Here a unit holds a stand-in that owns the operator's large parameters and calls
the operator's own forward; the operator's forward attribute leads to the unit. So ``isinstance``, hooks, attribute
access and parameter names stay what the user wrote.

Note [each unit is its own root]: a wrapper around the whole LightningModule breaks manual optimization and forward
redirection. Streams, the reducer and the bound on gathers are therefore shared by hand.

Note [one layout per parameter]: units are not flattened, so a ``Parameter`` keeps its identity (its ``.data``
changes between shard and whole), an optimizer made before sharding stays valid, and parameter groups need no care.
Small parameters stay outside, so an operator usually has a single sharded weight. Where a unit has several, they are
gathered together (``unit_collectives.CoalescedAllGather``) and reduced one by one, as their gradients come, or, small ones on a CPU, together
when all have come (``unit_collectives.CoalescedReduceScatter``).

Note [groups]: FairScale asks a process group for its rank and size and hands it on to the collectives. A unit gives it
a ``Communicator`` instead, which knows whether to run in one stage or two. In group sharding that one spans the
node, so FairScale's mean is the node's, and ``communicators.InterNodeAllReduce`` makes it the world's.

Note [a forward inside the backward]: torch's non-reentrant checkpoint runs a block again within the backward pass, only
to see which tensors it saves; gradients flow through the graph of the first run, whose hooks are in place. So a unit
that is run again gathers, runs, leaves everything as it found it, and registers nothing. Often the unit is in the
middle of its own backward by then, and its whole parameters must stay; and often the second run ends early, by an
exception, once the last tensor that is needed has been saved. (Reentrant checkpoint has no graph of the first run:
there the second run is an ordinary forward.)

Note [frozen parameters]: FairScale frees whole parameters once their gradient has come. Those that are not trained have
none, so they would stay whole to the end of the backward pass: of a large frozen model with adapters, all of it. A node
in the graph on the inputs' side is reached when the unit's own backward is over.

Note [several outputs]: FairScale prepares a unit's backward at each of its outputs. Where a later one's turn comes only
when gradients of the unit have come already (what T5's first block hands on to all others), parameters that are still
needed are still whole; those that are done must not be gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, TrainingState
from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale_module
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_osdp.backend.hierarchical import Communicator, cached_group_copy
from lightning_osdp.backend.streams import ModuleProxy, create_prefetch_limiter, create_streams
from lightning_osdp.engine.fairscale.communicators import CommunicatorFactory, UnitCommunicators, sharded_operators
from lightning_osdp.engine.fairscale.unit_collectives import (
    CoalescedAllGather,
    CoalescedReduceScatter,
    GradientReducer,
    PrefetchOrder,
    is_in_backward,
)
from lightning_osdp.engine.optimizer_in_backward import BackwardOptimizer
from lightning_osdp.engine.sliced_operator import ForwardStage, WeightSlice
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan


def _all_gather(output_flat: Tensor, shard: Tensor, group: Communicator | dist.ProcessGroup) -> None:
    if isinstance(group, dist.ProcessGroup):  # of a user's own FairScale units in this process
        dist.all_gather_into_tensor(output_flat, shard, group=group)
    else:
        group.all_gather(output_flat, shard)


# FairScale calls a private, deprecated name; this is the same collective, and the one that is measured.
fairscale_module.dist = ModuleProxy(dist, _all_gather_base=_all_gather)


UNIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What parameters of a unit may be."""


class _Body(nn.Module):
    """What a unit holds: the operator's large parameters and its own forward."""

    def __init__(self, forward: Callable[..., Any], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._operator_forward = forward
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._operator_forward(*args, **kwargs)


@contextmanager
def _reinterpret_as_float16(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Within it, bfloat16 parameters pass for float16, bit by bit: FairScale knows no other 16-bit type.

    It cuts them up there and computes nothing; what it gathers later is of the unit's ``compute_dtype``.
    """
    halves = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter in halves:
        parameter.data = parameter.data.view(torch.float16)
    yield
    for parameter in halves:
        parameter.data = parameter.data.view(torch.bfloat16)


class _BackwardEndHook(torch.autograd.Function):
    """Hands tensors on, and their gradients back, calling ``done`` on the way."""

    @staticmethod
    def forward(ctx: Any, on_backward_end: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.done = on_backward_end
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.done()
        return None, *gradients


def _attach_backward_end_hook(inputs: Any, on_backward_end: Callable[[], None]) -> Any:
    """``inputs`` as they are; ``on_backward_end`` is called once the gradients of all tensors in them have come."""
    leaves, tree = tree_flatten(inputs)
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if at:
        noted = _BackwardEndHook.apply(on_backward_end, *(leaves[index] for index in at))  # type: ignore[no-untyped-call]
        for index, tensor in zip(at, noted, strict=True):
            leaves[index] = tensor
    return tree_unflatten(leaves, tree)


class FairScaleUnit(FullyShardedDataParallel):  # type: ignore[misc]
    """One FairScale instance around one operator, sharing streams, reducer and the bound on gathers with all others."""

    _context: EngineContext

    def __init__(
        self,
        stage: nn.Module | ForwardStage,
        parameters: list[nn.Parameter],
        mode: Mode,
        communicators: UnitCommunicators,
        context: EngineContext,
        is_recomputed: bool = False,
    ) -> None:
        body = _Body(stage.forward, parameters)
        self._coalesced_gather = CoalescedAllGather(communicators.gather)
        self._is_prefetched = communicators.is_prefetched(parameters)
        dtype = parameters[0].dtype
        with _reinterpret_as_float16(parameters):
            super().__init__(
                body,
                process_group=self._coalesced_gather,
                process_group_reduce_scatter=communicators.select_reduce_communicator(parameters),
                reshard_after_forward=mode == Mode.ZDP,
                disable_reshard_on_root=False,
                flatten_parameters=False,
                bucket_cap_mb=0,
                compute_dtype=parameters[0].dtype,
                compute_device=context.device,
                clear_autocast_cache=True,
            )
        self.compute_dtype = self.buffer_dtype = dtype
        if dtype != torch.float16:  # whose sum might overflow
            # The mean: FairScale divides the whole gradient before it is reduced. Its part afterwards is less work.
            self.gradient_predivide_factor, self.gradient_postdivide_factor = 1.0, float(self.world_size)
        self._context = context
        self._inter_node_all_reduce = communicators.inter_node_all_reduce
        self._streams = context.streams
        self._reducer = context.reducer
        self._output_pre_backward_hook_registered: list[int] = []
        self._is_recomputed = is_recomputed
        self._in_graph = self._backward_done = False
        self._is_forward_stage = isinstance(stage, ForwardStage)
        self._weight_slice = stage if isinstance(stage, WeightSlice) else None
        # The node's tensors are views, which must not be changed in place: who knows what a user's own module does.
        keeps_inputs = self._is_forward_stage or type(stage).__module__.startswith(("torch.nn.", "transformers."))
        self._frees_on_input_gradient = keeps_inputs and mode == Mode.ZDP
        # With the signature of the stage's own: transformers' ``generate`` looks at that.
        stage.forward = update_wrapper(partial(self.forward), stage.forward)
        if isinstance(stage, ForwardStage):
            stage.free_full_params = self._free_full_params

    @property
    def num_collectives(self) -> int:
        """In one step: a gather for each pass that needs one, and for each parameter, or for all together, a
        reduce-scatter and an all-reduce between nodes.

        Of a recomputed block, the unit with which its backward begins gathers once less: see the note above.
        """
        if self.world_size == 1:
            return 0
        gathers = 2 + int(self._is_recomputed) if self._orig_reshard_after_forward else 1
        reductions = 2 if self._inter_node_all_reduce is not None else 1
        trained = sum(int(p.requires_grad) for p in self.params)
        together = isinstance(self.process_group_reduce_scatter, CoalescedReduceScatter)
        return gathers + reductions * (min(1, trained) if together else trained)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's forward with whole parameters; outside of training they are freed at once in every mode."""
        if self._context.params_summoned:
            raise ShardingError("the model can't run while its parameters are shown whole: leave that context first")
        if self._in_graph and is_in_backward():
            return self._recompute_forward(*args, **kwargs)
        if self._frees_on_input_gradient and torch.is_grad_enabled() and not any(p.requires_grad for p in self.params):
            args, kwargs = self._hook_backward_end(args, kwargs)
        outputs = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._in_graph, self._backward_done = True, False
        else:
            self.reshard()
        return outputs

    def _recompute_forward(self, *args: Any, **kwargs: Any) -> Any:
        """See Note [a forward inside the backward]."""
        was_whole, amid_backward = self.has_full_params, self.training_state == TrainingState.BACKWARD_PRE
        self._gather_all()
        try:
            return self.module(*args, **kwargs)
        finally:
            if not was_whole:
                self._free_full_params()
            if not amid_backward:
                self._use_fp32_param_shard()
            torch.clear_autocast_cache()

    def _hook_backward_end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Note [frozen parameters]. Of a slice the input alone: it adds to its other argument in place."""
        noted, rest = (args[:1], args[1:]) if self._is_forward_stage else (args, ())
        noted, kwargs = _attach_backward_end_hook((noted, kwargs), self._free_during_backward)
        return (*noted, *rest), kwargs

    def _free_during_backward(self) -> None:
        """See Note [frozen parameters]."""
        self._free_full_params()
        self._use_fp32_param_shard()

    def finish_backward(self) -> None:
        """To be called when a backward pass is over, whether or not it reached this unit."""
        self._in_graph = self._in_graph and not self._backward_done
        self.reshard()

    def _wait_for_post_backward(self) -> None:
        super()._wait_for_post_backward()
        self._backward_done = True

    def _use_full_params(self) -> None:
        if self.training_state == TrainingState.BACKWARD_POST:  # see Note [several outputs]
            return
        # Freed where another backward pass ended between this unit's forward and its backward.
        self._rebuild_full_params()
        super()._use_full_params()

    @property
    def has_unsharded_params(self) -> bool:
        """Whether any of its parameters is whole now: after a backward pass, those that it did not reach are."""
        if self.world_size == 1:
            return False
        wholes = [getattr(parameter, "_full_param_padded", None) for parameter in self.params]
        return any(whole is not None and whole.untyped_storage().size() > 0 for whole in wholes)

    @property
    def is_unsharded(self) -> bool:
        """Whether all of its parameters are whole now, for the model or for whoever looks at them."""
        return self.world_size == 1 or self._context.params_summoned or bool(self.has_full_params)

    def unshard(self) -> None:
        """Makes its parameters whole, until ``reshard``. Collective."""
        self._lazy_init()
        self._gather_all()

    def detach_hooks(self) -> None:
        """To be called when the unit's parameters become another's: they no longer lead to it."""
        for parameter in self.params:
            hook = getattr(parameter, "_shard_bwd_hook", None)
            if hook is not None:
                hook[1].remove()

    def reshard(self) -> None:
        """Frees the whole parameters if they are still there, and makes the unit ready for its next forward."""
        if self.has_unsharded_params:
            self._free_full_params()
            self._use_fp32_param_shard()
        self._pre_backward_hook_has_run = False

    def _wait_for_previous_optim_step(self) -> None:
        # FairScale's root does this in every forward. With each unit a root, gathers would wait for the compute
        # of the unit before, and nothing would overlap: once after each optimizer step is enough.
        if self._context.parameters_changed:
            self._context.parameters_changed = False
            super()._wait_for_previous_optim_step()

    def _rebuild_full_params(self, force_full_precision: bool = False) -> Any:
        if self.training_state == TrainingState.BACKWARD_POST:  # see Note [several outputs]
            return []
        return self._gather_all(force_full_precision)

    def _gather_all(self, force_full_precision: bool = False) -> Any:
        gathers = not self.has_full_params
        if gathers:
            self._context.prefetch_limiter.before_gather()
        found = super()._rebuild_full_params(force_full_precision)
        if self._coalesced_gather.has_pending:
            cuda = fairscale_module.torch.cuda
            with cuda.stream(self._streams["all_gather"]):
                self._coalesced_gather.flush()
            cuda.current_stream().wait_stream(self._streams["all_gather"])
        following = self._context.prefetch_order.predict_next(self) if gathers else None
        if following is not None:
            following.start_prefetch()
        return found

    def start_prefetch(self) -> None:
        """Begins to gather parameters that will be needed next, if this unit runs ahead and has none yet."""
        if (
            not self._is_prefetched
            or self.has_full_params
            or self._coalesced_gather.is_started
            or self._has_shared_params
        ):
            return
        wholes = [parameter._full_param_padded for parameter in self.params]
        for whole in wholes:
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        self._coalesced_gather.start(wholes, [parameter.data for parameter in self.params])

    def _register_post_backward_hooks(self) -> None:
        # FairScale's registers one more hook in every forward, and all of them are called in every backward: the
        # node that accumulates a parameter's gradient lives as long as the note that holds the hook.
        if not torch.is_grad_enabled():
            return
        for parameter in self.params:
            if parameter.requires_grad:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                if getattr(parameter, "_shard_bwd_hook", (None,))[0] is not node:
                    handle = node.register_hook(partial(self._post_backward_hook, parameter))
                    parameter._shard_bwd_hook = (node, handle)

    def _post_reduction_hook(self, param: nn.Parameter, reduced_grad: Tensor) -> None:
        if self._inter_node_all_reduce is None:
            super()._post_reduction_hook(param, reduced_grad)
            if self.world_size > 1:
                self._step_in_backward(param)
            return
        self._inter_node_all_reduce.wait_before_accumulation(param)
        super()._post_reduction_hook(param, reduced_grad)
        self._inter_node_all_reduce.on_shard_reduced(param, param._saved_grad_shard)  # type: ignore[attr-defined]

    def _step_in_backward(self, param: nn.Parameter) -> None:
        """Where parameters are updated in the backward pass: this one, or the weight that it is the last slice of."""
        updates, whole = (
            self._context.backward_optimizer,
            self._weight_slice.full_parameter if self._weight_slice is not None else param,
        )
        if not updates.should_update(whole):
            return
        # What FairScale would do when the pass is over.
        param.grad = param._saved_grad_shard  # type: ignore[attr-defined]
        del param._saved_grad_shard  # type: ignore[attr-defined]
        if self._weight_slice is None or self._weight_slice.on_gradient_reduced():
            updates.step_parameter(whole)

    def _free_full_params(self, params: Any = None) -> None:
        was_whole = self.has_full_params
        self._coalesced_gather.wait()
        super()._free_full_params(params)
        if was_whole:
            self._context.prefetch_limiter.after_free()


class EngineContext:
    """What all units of one engine have in common.

    Args:
        device: of the rank.
        group: all ranks.
        plan: says whether nodes matter, and how many there are.
    """

    def __init__(self, device: torch.device, group: Any, plan: ExecutionPlan) -> None:
        self.device = device
        # Reductions of their own: their order is fixed, that of the units' collectives follows autograd.
        self.replica_group = cached_group_copy(group, "replicas")
        self.parameters_changed = True
        self.params_summoned = False
        self.update_in_backward = plan.update_in_backward
        self.backward_optimizer = BackwardOptimizer()
        self.reducer = GradientReducer()
        self.prefetch_order = PrefetchOrder[FairScaleUnit]()
        self.communicator_factory = CommunicatorFactory(
            group, device, [op.choice for op in sharded_operators(plan)], plan.cluster
        )
        self.streams = create_streams(device, ("fp32_to_fp16", "all_gather", "post_backward"), fairscale_module)
        self.prefetch_limiter = create_prefetch_limiter(device)
