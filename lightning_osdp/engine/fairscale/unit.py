"""Units: what is gathered and freed at once, each a FairScale FullyShardedDataParallel.

Note [the module tree is left alone]: FairScale's wrapper usually replaces a module in its parent, which changes
names, classes and state dict keys. Here a unit wraps a list of the operator's large parameters, and the operator's
``forward`` attribute leads to the unit. So ``isinstance``, hooks, attribute access and parameter names stay what the
user wrote. The list is only for FairScale's ``__init__``: a unit has no submodules afterwards, which take memory.

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

Note [the run of a unit]: it begins with the call of the module, before the first of its hooks, and ends after the last
one, so that hooks may read a weight and make others of it. A ``forward`` that is called by itself is a run, too. Then
parameters are what they were before: gathered for an outer run or a backward pass, or resharded.

Note [the backward of a unit]: it begins when autograd reads what the unit's forward has saved (``saved_tensors``), or
comes to a result of the unit, which covers what an operation has kept by itself; and it ends with the pass. Until then,
or until its gradient has come, a parameter is shown in full. Where its values are not needed, as in an embedding, only
its shape is shown, which autograd asks for when it stores the gradient.

Note [a forward inside the backward]: activation checkpointing runs a block again within the backward pass, only to see
which tensors it saves. Often the unit is in the middle of its own backward by then, and its parameters must stay
unsharded; and often the second run ends early, by an exception, once the last tensor that is needed has been saved.

Note [frozen parameters]: gathered parameters are freed once their gradient has come. Frozen ones have none; they are
freed when the last node that has saved them has run.

Note [order]: what is gathered and freed follows from the graph alone, never from when Python frees an object, since all
ranks must gather the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel, TrainingState
from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale_module
from torch import Tensor, nn
from torch._C._functorch import TransformType

from lightning_osdp.engine.fairscale.communicators import UnitCommunicators
from lightning_osdp.engine.fairscale.context import EngineContext
from lightning_osdp.engine.fairscale.joinable_unit import JoinableUnit, set_gradient_aside, show_gradient
from lightning_osdp.engine.fairscale.low_precision import shows_cast
from lightning_osdp.engine.fairscale.saved_tensors import GatheredValues, SavedTensorHooks, active_unit, hook_results
from lightning_osdp.engine.fairscale.unit_collectives import CoalescedAllGather, CoalescedReduceScatter
from lightning_osdp.engine.fairscale.unit_parameters import ShardedParameter, UnitParameters
from lightning_osdp.engine.replaced_method import replace_method
from lightning_osdp.engine.sliced_operator import ForwardStage, WeightSlice, late_option, refuse_transforms
from lightning_osdp.engine.splittable import has_parameter_hooks
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.state.autograd_state import NO_PASS, current_pass, is_in_backward
from lightning_osdp.state.guarded_parameter import without_guards

_NEEDLESS = (
    *("uncollected_opt_state", "no_broadcast_optim_state", "state_dict_device", "verbose", "_tstart"),
    *("state_dict_on_rank_0_only", "allow_reset_parameters", "force_input_to_fp32", "bucket_cap_mb", "buffer_size"),
    *("numel_padded_per_param", "_has_params", "_num_flatten_params", "_param_name_groups", "flatten_parameters"),
)
"""Attributes that FairScale reads in what a unit does not use."""


class FairScaleUnit(UnitParameters, FullyShardedDataParallel, JoinableUnit):  # type: ignore[misc]
    """One FairScale instance around one operator, or around a stage of a sliced operator.

    Args:
        stage: what the unit runs in its ``forward``, which is replaced.
        parameters: the parameters to shard, all of one data type.
        mode: ``Mode.ZDP2`` or ``Mode.ZDP``.
        communicators: run the unit's collectives.
        context: what all units of the engine share.
        is_recomputed: whether the unit lies in a block that is recomputed.
        label: the unit's name in errors.
        compute_dtypes: by parameter, the type of the casts of it that are gathered under autocast (``low_precision``).
        not_read_in_backward: parameters that the traced backward does not read.
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
        compute_dtypes: Mapping[nn.Parameter, torch.dtype] = MappingProxyType({}),
        not_read_in_backward: Collection[nn.Parameter] = (),
    ) -> None:
        dtype = parameters[0].dtype
        self._coalesced_gather = CoalescedAllGather(communicators.gather)
        self._is_prefetched = communicators.is_prefetched(parameters)
        with _reinterpret_as_float16(parameters):
            super().__init__(
                nn.ParameterList(parameters),
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

        self._operator_forward = stage.forward
        self._drop_needless_parts()
        self._context, self.label = context, label
        self._register(self.params)
        self._prepare_parameters(compute_dtypes, not_read_in_backward)
        self._inter_node_all_reduce = communicators.inter_node_all_reduce
        self._is_recomputed = is_recomputed
        self._weight_slice = stage if isinstance(stage, WeightSlice) else None
        self._hooked_modules = [] if isinstance(stage, ForwardStage) else list(stage.modules())
        self._places = [
            (module._parameters, name, parameter)
            for module in self._hooked_modules
            for name, parameter in module._parameters.items()
            if parameter in self.param_indices
        ]
        tables = [module for module in self._hooked_modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        self._tables = [table for table in tables if table._parameters.get("weight") in self.param_indices]
        self._num_running, self._in_graph = 0, False
        self._joined_pass = self._begun_pass = NO_PASS
        self._finished: set[nn.Parameter] = set()
        self._pending_uses: dict[nn.Parameter, int] = {}
        if isinstance(stage, ForwardStage):
            stage.free_full_params = self._free_full_params
            stage.forward = self.forward
            if self._weight_slice is not None and compute_dtypes and not self._weight_slice.is_table:
                self._weight_slice.read_weight = self._read_slice
        else:
            replace_method(stage, "_call_impl", partial(self._run, stage._call_impl))
            replace_method(stage, "forward", self.forward)

    @property
    def num_collectives(self) -> int:
        """Number of collectives in one step.

        There is a gather for each pass that needs one and, for each parameter or for all together, a reduce-scatter and
        an all-reduce between nodes. In a recomputed block, the unit with which the backward begins gathers once less:
        see Note [a forward inside the backward].
        """
        if self.world_size == 1:
            return 0
        is_gathered_again = not all(p in self._not_read_in_backward for p in self.params)
        gathers = 1 + is_gathered_again + self._is_recomputed if self._orig_reshard_after_forward else 1
        reductions = 2 if self._inter_node_all_reduce is not None else 1
        num_trainable = sum(int(p.requires_grad) for p in self.params)
        is_coalesced = isinstance(self.process_group_reduce_scatter, CoalescedReduceScatter)
        return gathers + reductions * (min(1, num_trainable) if is_coalesced else num_trainable)

    def _drop_needless_parts(self) -> None:
        """Free the modules in which FairScale has wrapped the parameters, registries of hooks, and attributes."""
        self._modules.clear()
        attributes = vars(self).items()
        self.__dict__ = {k: v for k, v in attributes if k not in _NEEDLESS and not isinstance(v, OrderedDict)}

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up as any module does: FairScale goes on in the module that it has wrapped."""
        return nn.Module.__getattr__(self, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator with full parameters; without gradients they are freed at once in every mode."""
        return self._run(self._operator_forward, *args, **kwargs)

    def _run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See Note [the run of a unit]."""
        self._context.check_run()
        with_grad = torch.is_grad_enabled()
        if self.world_size == 1 or (self._num_running and (not with_grad or active_unit() is self)):
            return function(*args, **kwargs)
        if self._places and all(own.get(name) is not parameter for own, name, parameter in self._places):
            return function(*args, **kwargs)  # others have been put in their place, as ``functional_call`` does
        if any(table.max_norm is not None for table in self._tables):
            raise late_option(f"{self.label} is sharded", "max_norm changes rows that other ranks have")
        if with_grad:
            refuse_transforms("there are hooks on what autograd saves", {TransformType.Grad})
        with without_guards(), torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self._lazy_init()
        reads_casts, hidden = self._reads_casts(), [p for p in self.params if p not in self._shown_in_full]
        gathered = self._gather(self.params, as_is=not reads_casts)
        self._use_full_params(hidden, as_casts=reads_casts)
        versions = [parameter._version for parameter in self.params]
        casts_of_outer_run, self._casts_of_run = self._casts_of_run, {}
        hooks = SavedTensorHooks(self, self._pending_uses) if with_grad else None
        first_node = torch._C._autograd._get_sequence_nr()
        if hooks is not None:
            self._in_graph = True
            if not is_in_backward():
                self._finished.clear()
            self._register_post_backward_hooks()
            hooks.push()
        self._num_running += 1
        try:
            outputs = self._copy_views(function(*args, **kwargs))
        finally:
            self._num_running -= 1
            self._casts_of_run = casts_of_outer_run
            if hooks is not None:
                hooks.pop()
            if self._num_running == 0:
                hooked = any(module._forward_pre_hooks or module._forward_hooks for module in self._hooked_modules)
                self._keep_changes(versions, hooked)
                gathered, self._read_as_is = gathered + self._read_as_is, []
            if self.reshard_after_forward or not with_grad:
                self._free_full_params(gathered)
            self._use_fp32_param_shard(hidden)
            torch.clear_autocast_cache()
        if with_grad and self._num_running == 0:
            hook_results(outputs, first_node, self.begin_backward)
        return outputs

    def _read_slice(self) -> Tensor:
        """Return what the product of a slice reads."""
        (parameter,) = self.params
        return self.cast_of(parameter) if shows_cast(parameter) else parameter

    # The backward pass

    def version_of(self, parameter: ShardedParameter) -> int:
        """Return autograd's count of changes in place, of the weight where this unit has a slice of it."""
        with without_guards():
            weight: Tensor = self._weight_slice.full_parameter if self._weight_slice is not None else parameter
            return weight._version

    def begin_backward(self, *_: object) -> None:
        """See Note [the backward of a unit]."""
        if self._begun_pass == current_pass():
            return
        self._begun_pass = self._join_pass()
        self._gather_for_backward()

    def _join_pass(self) -> int:
        """Have ``finish_pass`` called when the running backward pass is over, and return its number."""
        number = current_pass()
        if self._joined_pass != number:
            self._joined_pass = number
            self._finished.clear()
            self._context.backward_passes.join(number, self)
        return number

    def unshard_for_backward(self, values: GatheredValues) -> None:
        """Gather a parameter that a node needs though its gradient has come, or outside of a pass."""
        self._gather([values.parameter], values.as_is)

    def reshard_after_last_use(self, parameter: ShardedParameter) -> None:
        """See Note [frozen parameters]."""
        if self.reshard_after_forward and not self._num_running:
            self._finished.add(parameter)
            self._free_full_params([parameter])
            self._use_fp32_param_shard([parameter])

    def _before_accumulation(self, parameter: ShardedParameter, *_: object) -> None:
        """Show autograd the full shape of a parameter whose gradient has come, and put earlier gradients aside."""
        self._join_pass()
        with without_guards():
            set_gradient_aside(parameter)
        if self._has_parameter_hooks(parameter):
            self._gather([parameter], as_is=True)  # the user's hooks may read it
        self._use_full_params([parameter])
        self.training_state = TrainingState.BACKWARD_POST

    def _has_parameter_hooks(self, parameter: ShardedParameter) -> bool:
        return self._weight_slice is None and has_parameter_hooks(parameter)

    def _post_backward_hook(self, param: ShardedParameter, *_: object) -> None:
        if param.grad is not None and param.grad.requires_grad:
            raise ShardingError(
                "backward(create_graph=True) makes gradients that are part of a graph, which can't be reduced over the "
                "ranks: use torch.autograd.grad(..., create_graph=True) for what is differentiated again"
            )
        self._finished.add(param)
        with without_guards():
            if self.world_size == 1:
                super()._post_backward_hook(param)
                return
            if self._has_parameter_hooks(param) and param in self._shown_in_full:
                with torch.no_grad():
                    self._keep_change(param, is_changed=True)
            if param.grad is not None:
                self._reduce_gradient(param)

    def _reduce_gradient(self, param: ShardedParameter) -> None:
        """Free a parameter and begin to reduce its gradient, which nothing holds longer than that takes.

        FairScale does the same, but has the allocator find out when streams are done with the gradient.
        """
        self.training_state = TrainingState.BACKWARD_POST
        self._free_full_params([param])
        self._use_fp32_param_shard([param])
        gradient, param.grad = [param.grad.data], None
        cuda, group = fairscale_module.torch.cuda, self.process_group_reduce_scatter
        self._reducer.bound_memory(gradient[0], group)
        self._streams["post_backward"].wait_stream(cuda.current_stream())
        with cuda.stream(self._streams["post_backward"]):
            if self.gradient_predivide_factor > 1:
                gradient[0].div_(self.gradient_predivide_factor)
            self._reducer.reduce(gradient, group, partial(self._post_reduction_hook, param))

    def finish_pass(self) -> None:
        """Hand out gradients when a backward pass is over, and free what is gathered for it."""
        self._joined_pass = self._begun_pass = NO_PASS
        if self.reshard_after_forward:
            self._free_full_params()
        self._use_fp32_param_shard()
        self.show_gradients()

    def detach_hooks(self) -> None:
        """Remove the hooks through which the parameters lead to this unit, since another unit takes them."""
        for parameter in self.params:
            for hook in getattr(parameter, "_shard_bwd_hook", ())[1:]:
                hook.remove()

    def reshard(self) -> None:
        """Free gathered parameters if there are any."""
        self._joined_pass, self._begun_pass, self._in_graph = NO_PASS, NO_PASS, False
        self._pending_uses.clear()
        self._saved.clear()
        self._unread_casts.clear()
        if self.world_size > 1 and (self.has_unsharded_params or self._shown_in_full):
            self._free_full_params()
            self._use_fp32_param_shard()

    def _wait_for_previous_optim_step(self) -> None:
        # FairScale's root does this in every forward. With each unit a root, gathers would wait for the compute of
        # the previous unit, and nothing would overlap. Once after each optimizer step is enough.
        if self._context.parameters_changed:
            self._context.parameters_changed = False
            super()._wait_for_previous_optim_step()

    def _register_post_backward_hooks(self) -> None:
        # FairScale registers one more hook in every forward, and all of them are called in every backward: the node
        # that accumulates a parameter's gradient lives as long as the attribute that holds the hook.
        for parameter in self.params:
            if parameter.requires_grad:
                with without_guards():
                    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                if getattr(parameter, "_shard_bwd_hook", (None,))[0] is not node:
                    before = node.register_prehook(partial(self._before_accumulation, parameter))
                    after = node.register_hook(partial(self._post_backward_hook, parameter))
                    parameter._shard_bwd_hook = (node, before, after)

    def _post_reduction_hook(self, param: ShardedParameter, reduced_grad: Tensor) -> None:
        reduced_grad = reduced_grad.to(param._fp32_shard.dtype)  # the plan may have it reduced in another type
        if self._inter_node_all_reduce is None:
            super()._post_reduction_hook(param, reduced_grad)
            if self.world_size > 1:
                self._step_in_backward(param)
            return
        self._inter_node_all_reduce.wait_before_accumulation(param)
        super()._post_reduction_hook(param, reduced_grad)
        self._inter_node_all_reduce.on_shard_reduced(param, param._saved_grad_shard)

    def _step_in_backward(self, param: ShardedParameter) -> None:
        """Update ``param``, or the weight of which it is the last slice, if the plan updates in the backward pass."""
        optimizer = self._context.backward_optimizer
        parameter = self._weight_slice.full_parameter if self._weight_slice is not None else param
        if not optimizer.should_update(parameter):
            return
        show_gradient(param)  # FairScale would do this when the backward pass is over
        if self._weight_slice is None or self._weight_slice.on_gradient_reduced():
            optimizer.step_parameter(parameter)


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
