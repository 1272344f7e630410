"""The engine on FairScale's FullyShardedDataParallel: the only file that imports fairscale.

Note [the module tree is left alone]: FairScale's wrapper usually replaces a module in its parent, which changes
names, classes and state dict keys. Here a unit holds a stand-in that owns the operator's large parameters and calls
the operator's own forward; the operator's forward attribute leads to the unit. So ``isinstance``, hooks, attribute
access and parameter names stay what the user wrote.

Note [each unit is its own root]: a wrapper around the whole LightningModule breaks manual optimization and forward
redirection. Streams, the reducer and the bound on gathers are therefore shared by hand.

Note [one collective per parameter]: units are not flattened, so a ``Parameter`` keeps its identity (its ``.data``
changes between shard and whole), an optimizer made before sharding stays valid, and parameter groups need no care.
Small parameters stay outside, so an operator usually has a single sharded weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale_module
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp import collectives
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.operators import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.sharding import state as states
from lightning_osdp.sharding.layout import Layout
from lightning_osdp.sharding.pending import Pending
from lightning_osdp.sharding.replicas import Replicas
from lightning_osdp.sharding.state import Fill, Shards
from lightning_osdp.sharding.without_cuda import NO_STREAM, View, run_without_cuda

# FairScale calls a private, deprecated name; this is the same collective, and the one that is measured.
fairscale_module.dist = View(dist, _all_gather_base=collectives.all_gather)

GATHERS_IN_FLIGHT = 2
"""How many gathers may run ahead of compute on CUDA: the one in use and the next. FairScale sets no bound."""


class FairScaleEngine:
    """Carries out a plan with one FairScale unit for each sharded operator and bucketed all-reduce for the rest.

    Args:
        device: where the rank computes; ``cpu`` needs a gloo process group, ``cuda`` an NCCL one.
        group: the ranks to shard over; the whole world if None.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self._device = device
        self._group: Any = group if group is not None else dist.group.WORLD
        self._units: list[_Unit] = []
        self._replicas: Replicas | None = None
        self._module: nn.Module | None = None
        self._shards = Shards({}, self._group)
        self._known: frozenset[nn.Parameter] = frozenset()
        self._shared: _Shared | None = None

    @property
    def collectives_per_step(self) -> int:
        """Gathers and reduce-scatters of the units, and the buckets of replicated gradients."""
        assert self._replicas is not None
        return sum(unit.num_collectives for unit in self._units) + self._replicas.num_collectives

    @property
    def module(self) -> nn.Module | None:
        """The module that a plan was applied to."""
        return self._module

    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        """See ``Engine.check``."""
        modules = dict(module.named_modules())
        owner: dict[nn.Parameter, str] = {}
        for operator in _sharded(plan):
            if operator.name not in modules or not operator.name:
                raise ShardingError(f"the plan shards {operator.name!r}, which is not a submodule of this module")
            if len(operator.slices) > 1 or operator.checkpoint:
                raise ShardingError(f"{operator.name}: split and recomputed operators are not supported yet")
            for parameter in _large_parameters(modules[operator.name]):
                if parameter in owner:
                    raise ShardingError(
                        f"{operator.name} and {owner[parameter]} share a parameter: both can't shard it"
                    )
                owner[parameter] = operator.name
        for name, parameter in module.named_parameters(remove_duplicate=False):
            home = owner.get(parameter)
            if home is not None and not name.startswith(home + "."):
                raise ShardingError(f"{home} can't be sharded: its parameter is also {name}, outside of it")
            if home is not None and parameter.dtype != torch.float32:
                raise ShardingError(f"{name} is {parameter.dtype}: FairScale's units hold float32 parameters only")

    def apply(self, module: nn.Module, plan: ExecutionPlan, optimizers: Iterable[Optimizer] = ()) -> None:
        """See ``Engine.apply``. The module is never whole on the device: operators are moved and sharded in turn."""
        self.check(module, plan)
        self._module = module
        self._shared = _Shared(self._device, self._group)
        names = {p: n for n, p in module.named_parameters()}
        layouts: dict[nn.Parameter, Layout] = {}
        for operator in _sharded(plan):
            body = module.get_submodule(operator.name)
            parameters = _large_parameters(body)
            for parameter in parameters:
                self._place(parameter)
                layouts[parameter] = Layout.sharded(parameter.shape, self._group)
            self._units.append(_Unit(body, parameters, Mode(operator.slices[0]), self._shared))
        for tensor in [p for p in names if p not in layouts] + list(module.buffers()):
            self._place(tensor)
        self._shards = Shards(layouts, self._group)
        self.take_in(optimizers)
        replicated = [p for p in module.parameters() if p not in layouts]
        self._replicas = Replicas(replicated, self._shared.replica_group)
        self._known = self._shards.parameters.union(replicated)
        # Its inference path reads the weights of submodules without calling them, so it would see shards.
        torch.backends.mha.set_fastpath_enabled(False)

    def take_in(self, optimizers: Iterable[Optimizer]) -> None:
        """See ``Engine.take_in``."""
        for optimizer in optimizers:
            self._shards.shard_existing_state(optimizer)

    def whole_shapes(self) -> AbstractContextManager[None]:
        """See ``Engine.whole_shapes``."""
        return self._shards.whole_shapes_shown()

    def no_sync(self) -> AbstractContextManager[None]:
        """See ``Engine.no_sync``."""
        return self._replicas.no_sync() if self._replicas is not None else nullcontext()

    def before_forward(self) -> None:
        """Takes in what changed since the last step: parameters that were unfrozen."""
        if self._replicas is not None:
            self._replicas.refresh()

    def finish_backward(self) -> None:
        """See ``Engine.finish_backward``. Frees units that a backward pass did not reach (frozen, or without loss)."""
        assert self._replicas is not None
        self._replicas.finish()
        for unit in self._units:
            unit.release()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """See ``Engine.before_optimizer_step``."""
        self.finish_backward()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._known:
                    raise ShardingError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is in no unit and in "
                        "no bucket: it was created after the strategy's setup. Create it in __init__ or configure_model"
                    )

    def after_optimizer_step(self) -> None:
        """See ``Engine.after_optimizer_step``."""
        assert self._shared is not None
        self._shared.parameters_changed = True

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See ``Engine.clip_grad_norm``."""
        with_gradient = [p for p in parameters if p.grad is not None]
        total = self._shards.grad_norm(with_gradient, norm_type, self._device)
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, total)
        return total

    def model_state(self, pending: Pending | None = None) -> dict[str, Any]:
        """See ``Engine.model_state``."""
        assert self._module is not None
        if pending is not None:
            return states.model_state(self._module, self._shards, pending)
        return states.at_once(self._shards, lambda now: self.model_state(now))

    def load_model_state(
        self, state: dict[str, Any], strict: bool = True, fill: Fill = states.fill_from_memory
    ) -> None:
        """See ``Engine.load_model_state``."""
        assert self._module is not None
        states.load_model_state(self._module, self._shards, state, strict, fill)
        self.after_optimizer_step()

    def optimizer_state(self, optimizer: Optimizer, index: int = 0, pending: Pending | None = None) -> dict[str, Any]:
        """See ``Engine.optimizer_state``."""
        if pending is not None:
            return states.optimizer_state(optimizer, self._shards, self._names(), index, pending)
        return states.at_once(self._shards, lambda now: self.optimizer_state(optimizer, index, now))

    def check_state(self, state: dict[str, Any], strict: bool, saved: Mapping[Optimizer, dict[str, Any]]) -> None:
        """See ``Engine.check_state``."""
        assert self._module is not None
        states.check_model_state(self._module, self._shards, state, strict)
        for optimizer, theirs in saved.items():
            states.fitting_optimizer_state(optimizer, self._shards, self._names(), theirs)

    def load_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], fill: Fill = states.fill_from_memory
    ) -> None:
        """See ``Engine.load_optimizer_state``."""
        states.load_optimizer_state(optimizer, self._shards, self._names(), state, fill)

    def _names(self) -> dict[nn.Parameter, str]:
        assert self._module is not None
        return {parameter: name for name, parameter in self._module.named_parameters()}

    def _place(self, tensor: Tensor) -> None:
        """Moves a parameter or buffer to the device, in place, with rank 0's values."""
        tensor.data = tensor.data.to(self._device)
        dist.broadcast(tensor.data, src=dist.get_global_rank(self._group, 0), group=self._group)


def _sharded(plan: ExecutionPlan) -> list[OperatorPlan]:
    return [op for op in plan.operators if any(mode != Mode.DP for mode in op.slices)]


def _large_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that a unit takes (see ``ParameterInfo.small``)."""
    return [p for p in module.parameters() if p.dim() > 1 or p.numel() >= SMALL_PARAMETER_ELEMENTS]


class _Body(nn.Module):
    """What a unit holds: the operator's large parameters and its own forward."""

    def __init__(self, forward: Callable[..., Any], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._operator_forward = forward
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._operator_forward(*args, **kwargs)


class _Unit(FullyShardedDataParallel):  # type: ignore[misc]
    """One FairScale instance around one operator, sharing streams, reducer and the bound on gathers with all others."""

    _shared: _Shared

    def __init__(self, operator: nn.Module, parameters: list[nn.Parameter], mode: Mode, shared: _Shared) -> None:
        body = _Body(operator.forward, parameters)
        super().__init__(
            body,
            process_group=shared.group,
            process_group_reduce_scatter=shared.reduce_group,
            reshard_after_forward=mode == Mode.ZDP,
            disable_reshard_on_root=False,
            flatten_parameters=False,
            bucket_cap_mb=0,
            compute_device=shared.device,
            clear_autocast_cache=True,
        )
        self._shared = shared
        self._streams = shared.streams
        self._reducer = shared.reducer
        self._output_pre_backward_hook_registered: list[int] = []
        operator.forward = self.forward

    @property
    def num_collectives(self) -> int:
        """In one step: a gather for each pass that needs one, and a reduce-scatter."""
        if self.world_size == 1:
            return 0
        gathers = 2 if self._orig_reshard_after_forward else 1
        return sum(gathers + int(p.requires_grad) for p in self.params)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's forward with whole parameters; outside of training they are freed at once in every mode."""
        outputs = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.release()
        return outputs

    def release(self) -> None:
        """Frees the whole parameters if they are still there, and makes the unit ready for its next forward."""
        if self.has_full_params and self.world_size > 1:
            self._free_full_params()
            self._use_fp32_param_shard()
        self._pre_backward_hook_has_run = False

    def _wait_for_previous_optim_step(self) -> None:
        # FairScale's root does this in every forward. With each unit a root, gathers would wait for the compute
        # of the unit before, and nothing would overlap: once after each optimizer step is enough.
        if self._shared.parameters_changed:
            self._shared.parameters_changed = False
            super()._wait_for_previous_optim_step()

    def _rebuild_full_params(self, force_full_precision: bool = False) -> Any:
        if not self.has_full_params:
            self._shared.gathers.before_gather()
        return super()._rebuild_full_params(force_full_precision)

    def _free_full_params(self, params: Any = None) -> None:
        was_whole = self.has_full_params
        super()._free_full_params(params)
        if was_whole:
            self._shared.gathers.after_free()


class _Shared:
    """What all units of one engine have in common."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self.device = device
        self.group = group
        # Reductions of their own: their order is fixed, that of the units' collectives follows autograd.
        self.replica_group = dist.new_group(dist.get_process_group_ranks(group))
        self.parameters_changed = True
        self.reducer = _Reducer()
        if device.type == "cuda":
            self.reduce_group = dist.new_group(dist.get_process_group_ranks(group))
            names = ("fp32_to_fp16", "all_gather", "post_backward")
            self.streams: dict[str, Any] = {
                name: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for name in names
            }
            self.gathers: _GatherBound | _NoBound = _GatherBound(GATHERS_IN_FLIGHT)
        else:
            self.reduce_group = group
            run_without_cuda(fairscale_module)
            self.streams = dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), NO_STREAM)
            self.gathers = _NoBound()


class _Reducer:
    """Stands in for FairScale's bucketing reducer, which copies every gradient once more than needed."""

    def reduce_scatter_async(self, input_list: list[Tensor], group: Any, callback_fn: Callable[[Tensor], None]) -> None:
        """Sums ``input_list[i]`` over the ranks onto rank i and hands the result to ``callback_fn``."""
        whole = _joined(input_list)
        output = torch.empty_like(input_list[0])
        collectives.reduce_scatter(output, whole, group)
        callback_fn(output)

    def flush(self) -> None:
        """Nothing is held back."""

    def teardown(self) -> None:
        """Nothing is kept."""


def _joined(chunks: list[Tensor]) -> Tensor:
    """The tensor that ``chunks`` were cut from, without a copy where they still lie side by side."""
    first = chunks[0]
    storage, step = first.untyped_storage().data_ptr(), first.numel()
    for index, chunk in enumerate(chunks):
        in_place = chunk.untyped_storage().data_ptr() == storage
        if not in_place or chunk.storage_offset() != first.storage_offset() + index * step:
            return torch.cat(chunks)
    return first.as_strided((step * len(chunks),), (1,))


class _GatherBound:
    """Keeps the host from launching gathers whose memory could not be reused yet.

    A gather may start when at most ``limit - 1`` earlier ones have not been freed on the device's own clock. Without
    this, the host runs ahead of the device and whole parameters of many operators are allocated at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._freed: deque[Any] = deque()

    def before_gather(self) -> None:
        """Waits until few enough gathers are in flight."""
        while len(self._freed) >= self._limit:
            self._freed.popleft().synchronize()

    def after_free(self) -> None:
        """Marks the point in the compute stream after which the memory is free."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._freed.append(event)


class _NoBound:
    """On a CPU nothing runs ahead."""

    def before_gather(self) -> None:
        """Nothing to wait for."""

    def after_free(self) -> None:
        """Nothing to mark."""
