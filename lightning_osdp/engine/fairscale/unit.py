"""Units: what is gathered and freed at once, each a FairScale FullyShardedDataParallel. The only file that imports it.

Note [the module tree is left alone]: FairScale's wrapper usually replaces a module in its parent, which changes
names, classes and state dict keys. Here a unit holds a stand-in that owns the operator's large parameters and calls
the operator's own forward, and the operator's ``forward`` attribute leads to the unit. So ``isinstance``, hooks,
attribute access and parameter names stay what the user wrote.

Note [each unit is its own root]: a wrapper around the whole LightningModule breaks manual optimization and forward
redirection. Units therefore share streams, reducer and the limit on gathers explicitly (``EngineContext``).

Note [one layout per parameter]: units are not flattened, so a ``Parameter`` keeps its identity (its ``.data`` changes
between shard and full tensor), an optimizer made before sharding stays valid, and parameter groups need no care. Small
parameters stay outside, so an operator usually has a single sharded weight. Where a unit has several, they are gathered
together (``CoalescedAllGather``) and reduced one by one as their gradients come or, small ones on a CPU, together when
all have come (``CoalescedReduceScatter``).

Note [groups]: FairScale asks a process group for its rank and size and hands it on to the collectives. A unit gives it
a ``Communicator`` instead, which runs in one stage or two. With sharding inside nodes it spans the node, so FairScale's
mean is the node's, and ``communicators.InterNodeAllReduce`` makes it the mean over all ranks.

Note [a forward inside the backward]: torch's non-reentrant checkpoint runs a block again within the backward pass, only
to see which tensors it saves; gradients flow through the graph of the first run, whose hooks are in place. So a unit
that is run again gathers, runs, leaves everything as it was, and registers nothing. Often the unit is in the middle of
its own backward by then, and its parameters must stay unsharded; and often the second run ends early, by an exception,
once the last tensor that is needed has been saved. (Reentrant checkpoint has no graph of the first run: there the
second run is an ordinary forward.)

Note [frozen parameters]: FairScale frees gathered parameters once their gradient has come. Frozen ones have none, so
they would stay to the end of the backward pass: for a large frozen model with adapters, all of it. A node in the graph
on the inputs' side is reached when the unit's own backward is over, and frees them.

Note [several outputs]: FairScale prepares a unit's backward at each of its outputs. Where a later output's turn comes
only when gradients of the unit have come already (T5's first block hands a tensor on to all others), parameters that
are still needed are still gathered; those that are done must not be gathered again.
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
from lightning_osdp.engine.fairscale.collective_order import CollectiveOrder
from lightning_osdp.engine.fairscale.communicators import CommunicatorFactory, UnitCommunicators, sharded_operators
from lightning_osdp.engine.fairscale.joinable_unit import JoinableUnit, before_reduction
from lightning_osdp.engine.fairscale.unit_collectives import (
    CoalescedAllGather,
    CoalescedReduceScatter,
    GradientReducer,
    is_in_backward,
)
from lightning_osdp.engine.optimizer_in_backward import BackwardOptimizer
from lightning_osdp.engine.sliced_operator import ForwardStage, WeightSlice
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state.guarded_parameter import GuardContext, guard_of, without_guards


def _all_gather(output_flat: Tensor, shard: Tensor, group: Communicator | dist.ProcessGroup) -> None:
    if isinstance(group, dist.ProcessGroup):  # a user's own FairScale units in this process
        dist.all_gather_into_tensor(output_flat, shard, group=group)
    else:
        group.all_gather(output_flat, shard)


# FairScale calls a private, deprecated name; this is the same collective, and the one that is measured.
fairscale_module.dist = ModuleProxy(dist, _all_gather_base=_all_gather)


UNIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Data types that the parameters of a unit may have."""


STREAM_NAMES = ("fp32_to_fp16", "all_gather", "post_backward")
"""Names under which FairScale looks its streams up."""


class _Body(nn.Module):
    """The module inside a unit: it owns the operator's large parameters and calls the operator's forward."""

    def __init__(self, forward: Callable[..., Any], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._operator_forward = forward
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._operator_forward(*args, **kwargs)


@contextmanager
def _reinterpret_as_float16(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Show bfloat16 parameters as float16, bit by bit, within a context: FairScale knows no other 16-bit type.

    FairScale only shards them there and computes nothing; what it gathers later has the unit's ``compute_dtype``.
    """
    bfloat16 = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter in bfloat16:
        parameter.data = parameter.data.view(torch.float16)
    yield
    for parameter in bfloat16:
        parameter.data = parameter.data.view(torch.bfloat16)


class _BackwardEndHook(torch.autograd.Function):
    """An identity that calls ``on_backward_end`` when the gradients of all its tensors have come."""

    @staticmethod
    def forward(ctx: Any, on_backward_end: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.on_backward_end = on_backward_end
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.on_backward_end()
        return None, *gradients


def _attach_backward_end_hook(inputs: Any, on_backward_end: Callable[[], None]) -> Any:
    """Return ``inputs``; ``on_backward_end`` is called once the gradients of all tensors in them have come."""
    leaves, tree = tree_flatten(inputs)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if indices:
        hooked = _BackwardEndHook.apply(on_backward_end, *(leaves[index] for index in indices))  # type: ignore[no-untyped-call]
        for index, tensor in zip(indices, hooked, strict=True):
            leaves[index] = tensor
    return tree_unflatten(leaves, tree)


class FairScaleUnit(FullyShardedDataParallel, JoinableUnit):  # type: ignore[misc]
    """One FairScale instance around one operator, or around a stage of a sliced operator.

    Args:
        stage: what the unit runs in its ``forward``, which is replaced.
        parameters: the parameters to shard, all of one data type.
        mode: ``Mode.ZDP2`` or ``Mode.ZDP``.
        communicators: run the unit's collectives.
        context: what all units of the engine share.
        is_recomputed: whether the unit lies in a block that is recomputed.
        label: the unit's name in errors.
    """

    training_state: TrainingState

    def __init__(
        self,
        stage: nn.Module | ForwardStage,
        parameters: list[nn.Parameter],
        mode: Mode,
        communicators: UnitCommunicators,
        context: EngineContext,
        is_recomputed: bool = False,
        label: str = "a unit",
    ) -> None:
        body, dtype = _Body(stage.forward, parameters), parameters[0].dtype
        self._coalesced_gather = CoalescedAllGather(communicators.gather)
        self._is_prefetched = communicators.is_prefetched(parameters)
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
                # FairScale divides the full gradient before it is reduced. To divide the shard afterwards is less work,
                # but float16 sums could overflow: there FairScale's default is used.
                gradient_predivide_factor=None if dtype == torch.float16 else 1.0,
            )
        # FairScale's own attributes that it has no arguments for: the type that is gathered, where float16 stood for
        # bfloat16, and what a root creates for its children unless it is there.
        self.compute_dtype = self.buffer_dtype = dtype
        self._streams, self._reducer = context.streams, context.reducer

        self._context, self.label = context, label
        self._register(self.params)
        self._inter_node_all_reduce = communicators.inter_node_all_reduce
        self._is_recomputed = is_recomputed
        self._in_graph = self._backward_done = False
        self._is_forward_stage = isinstance(stage, ForwardStage)
        self._weight_slice = stage if isinstance(stage, WeightSlice) else None
        # The backward end hook turns inputs into views, which must not be changed in place: modules of torch and
        # transformers do not.
        keeps_inputs = self._is_forward_stage or type(stage).__module__.startswith(("torch.nn.", "transformers."))
        self._frees_on_input_gradient = keeps_inputs and mode == Mode.ZDP
        # With the signature of the original forward, which ``generate`` of transformers inspects.
        stage.forward = update_wrapper(partial(self.forward), stage.forward)
        if isinstance(stage, ForwardStage):
            stage.free_full_params = self._free_full_params

    @property
    def num_collectives(self) -> int:
        """Number of collectives in one step.

        There is a gather for each pass that needs one and, for each parameter or for all together, a reduce-scatter and
        an all-reduce between nodes. In a recomputed block, the unit with which the backward begins gathers once less:
        see Note [a forward inside the backward].
        """
        if self.world_size == 1:
            return 0
        gathers = 2 + int(self._is_recomputed) if self._orig_reshard_after_forward else 1
        reductions = 2 if self._inter_node_all_reduce is not None else 1
        num_trainable = sum(int(p.requires_grad) for p in self.params)
        is_coalesced = isinstance(self.process_group_reduce_scatter, CoalescedReduceScatter)
        return gathers + reductions * (min(1, num_trainable) if is_coalesced else num_trainable)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator with full parameters; without gradients they are freed at once in every mode."""
        if self._context.why_no_runs:
            raise ShardingError(self._context.why_no_runs)
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
        was_unsharded, in_own_backward = self.has_full_params, self.training_state == TrainingState.BACKWARD_PRE
        self._gather_all()
        try:
            return self.module(*args, **kwargs)
        finally:
            if not was_unsharded:
                self._free_full_params()
            if not in_own_backward:
                self._use_fp32_param_shard()
            torch.clear_autocast_cache()

    def _hook_backward_end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Note [frozen parameters]. A slice's other argument is left alone, since the slice adds to it in place."""
        hooked, rest = (args[:1], args[1:]) if self._is_forward_stage else (args, ())
        hooked, kwargs = _attach_backward_end_hook((hooked, kwargs), self._free_and_use_shards)
        return (*hooked, *rest), kwargs

    def _free_and_use_shards(self) -> None:
        self._free_full_params()
        self._use_fp32_param_shard()

    def finish_backward(self) -> None:
        """Free what is left when a backward pass is over, whether or not it reached this unit."""
        self._in_graph = self._in_graph and not self._backward_done
        self.reshard()

    # Parameters are guarded whenever their data are shards. FairScale itself reads shards in these places:

    def _lazy_init(self) -> None:
        with without_guards():
            super()._lazy_init()

    def _use_fp32_param_shard(self, params: list[nn.Parameter] | None = None) -> None:
        with without_guards():
            super()._use_fp32_param_shard(params)
        for parameter in self.params if params is None else params:
            guard = guard_of(parameter)
            if guard is not None:
                guard.close()

    def _post_backward_hook(self, param: nn.Parameter, *unused: Any) -> None:
        with without_guards():
            super()._post_backward_hook(param, *unused)

    def _wait_for_post_backward(self) -> None:
        with without_guards():
            super()._wait_for_post_backward()
        self._backward_done = True

    def _use_full_params(self) -> None:
        if self.training_state == TrainingState.BACKWARD_POST:  # see Note [several outputs]
            return
        # Parameters were freed if another backward pass ended between this unit's forward and its backward.
        self._rebuild_full_params()
        super()._use_full_params()

    @property
    def has_unsharded_params(self) -> bool:
        """Whether any parameter is gathered now; after a backward pass, those that it did not reach are."""
        if self.world_size == 1:
            return False
        gathered = [getattr(parameter, "_full_param_padded", None) for parameter in self.params]
        return any(tensor is not None and tensor.untyped_storage().size() > 0 for tensor in gathered)

    def drop_gathered(self) -> None:
        """Free gathered parameters, whose shards change; a backward pass that needs them gathers them again."""
        if self.has_unsharded_params:
            self._free_and_use_shards()

    def adopt_shards(self) -> None:
        """Use the data that parameters have now as their local shards."""
        for parameter in self.params:
            if hasattr(parameter, "_fp32_shard"):
                parameter._fp32_shard = parameter.data

    def detach_hooks(self) -> None:
        """Remove the hooks through which the parameters lead to this unit, since another unit takes them."""
        for parameter in self.params:
            hook = getattr(parameter, "_shard_bwd_hook", None)
            if hook is not None:
                hook[1].remove()

    def reshard(self) -> None:
        """Free gathered parameters if there are any, and make the unit ready for its next forward."""
        if self.has_unsharded_params:
            self._free_and_use_shards()
        self._pre_backward_hook_has_run = False

    def _wait_for_previous_optim_step(self) -> None:
        # FairScale's root does this in every forward. With each unit a root, gathers would wait for the compute of
        # the previous unit, and nothing would overlap. Once after each optimizer step is enough.
        if self._context.parameters_changed:
            self._context.parameters_changed = False
            super()._wait_for_previous_optim_step()

    def _rebuild_full_params(self, force_full_precision: bool = False) -> Any:
        if self.training_state == TrainingState.BACKWARD_POST:  # see Note [several outputs]
            return []
        return self._gather_all(force_full_precision)

    def _gather_all(self, force_full_precision: bool = False) -> Any:
        needs_gather = not self.has_full_params
        if needs_gather:
            self._context.order.before_gather(self._index, is_in_backward(), self._missing_indices())
            self._context.prefetch_limiter.before_gather()
        for parameter in self.params:
            guard = guard_of(parameter)
            if guard is not None:
                guard.open()
        full_params = super()._rebuild_full_params(force_full_precision)
        if self._coalesced_gather.has_pending:
            cuda = fairscale_module.torch.cuda
            with cuda.stream(self._streams["all_gather"]):
                self._coalesced_gather.flush()
            cuda.current_stream().wait_stream(self._streams["all_gather"])
        if needs_gather:
            self._context.order.prefetch_next()
        return full_params

    @contextmanager
    def _use_stream(self, name: str) -> Iterator[None]:
        cuda = fairscale_module.torch.cuda
        self._streams[name].wait_stream(cuda.current_stream())
        with torch.no_grad(), cuda.stream(self._streams[name]):
            yield
        cuda.current_stream().wait_stream(self._streams[name])

    def start_prefetch(self) -> None:
        """Start to gather the parameters if the unit is prefetched and they are not there or on their way."""
        is_gathered = self.has_full_params or self._coalesced_gather.is_started
        if not self._is_prefetched or is_gathered or self._has_shared_params:
            return
        if self._is_root is None:  # only other ranks have run it
            self._lazy_init()
        outputs = [parameter._full_param_padded for parameter in self.params]
        for output in outputs:
            output.untyped_storage().resize_(output.nbytes)
        with without_guards():
            self._coalesced_gather.start(outputs, [parameter.data for parameter in self.params])

    def _register_post_backward_hooks(self) -> None:
        # FairScale registers one more hook in every forward, and all of them are called in every backward: the node
        # that accumulates a parameter's gradient lives as long as the attribute that holds the hook.
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
        """Update ``param``, or the weight of which it is the last slice, if the plan updates in the backward pass."""
        optimizer = self._context.backward_optimizer
        parameter = self._weight_slice.full_parameter if self._weight_slice is not None else param
        if not optimizer.should_update(parameter):
            return
        # FairScale would do this when the backward pass is over.
        param.grad = param._saved_grad_shard  # type: ignore[attr-defined]
        del param._saved_grad_shard  # type: ignore[attr-defined]
        if self._weight_slice is None or self._weight_slice.on_gradient_reduced():
            optimizer.step_parameter(parameter)

    def _free_full_params(self, params: Any = None) -> None:
        was_unsharded = self.has_full_params
        self._coalesced_gather.wait()
        super()._free_full_params(params)
        if was_unsharded:
            self._context.prefetch_limiter.after_free()


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
        self.backward_optimizer = BackwardOptimizer()
        self.order = CollectiveOrder(group)
        self.guards = GuardContext(group, plan.update_in_backward)
        self.guards.before_access = self.order.before_access
        self.reducer = GradientReducer(partial(before_reduction, self.order))
        choices = [operator.choice for operator in sharded_operators(plan)]
        self.communicator_factory = CommunicatorFactory(group, device, choices, plan.cluster)
        self.streams = create_streams(device, STREAM_NAMES, fairscale_module)
        self.prefetch_limiter = create_prefetch_limiter(device)
