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

Note [groups]: FairScale asks a process group for its rank and size and hands it on to the collectives. A unit gives it
a ``Communicator`` instead, which knows whether to run in one stage or two. In group sharding that one spans the
node, so FairScale's mean is the node's, and ``lines.BetweenNodes`` makes it the world's.

Note [a forward inside the backward]: torch's non-reentrant checkpoint runs a block again within the backward pass, only
to see which tensors it saves; gradients flow through the graph of the first run, whose hooks are in place. So a unit
that is run again gathers, runs, leaves everything as it found it, and registers nothing. Often the unit is in the
middle of its own backward by then, and its whole parameters must stay; and often the second run ends early, by an
exception, once the last tensor that is needed has been saved. (Reentrant checkpoint has no graph of the first run:
there the second run is an ordinary forward.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, TrainingState
from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale_module
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.errors import ShardingError
from lightning_osdp.levels import Communicator, duplicate
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.operators import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.sharding import state as states
from lightning_osdp.sharding.gathers import GATHERS_IN_FLIGHT, GatherBound, NoBound
from lightning_osdp.sharding.initialise import Initialiser, check_initialisable
from lightning_osdp.sharding.layout import Layout
from lightning_osdp.sharding.lines import Line, Lines, sharded_operators
from lightning_osdp.sharding.pending import Pending
from lightning_osdp.sharding.recompute import check_recomputed, recompute
from lightning_osdp.sharding.replicas import Replicas
from lightning_osdp.sharding.splitting import SplitOperator, Stage, check_split
from lightning_osdp.sharding.state import Fill, Shards
from lightning_osdp.sharding.without_cuda import NO_STREAM, View, run_without_cuda


def _all_gather(output_flat: Tensor, shard: Tensor, group: Communicator) -> None:
    group.all_gather(output_flat, shard)


# FairScale calls a private, deprecated name; this is the same collective, and the one that is measured.
fairscale_module.dist = View(dist, _all_gather_base=_all_gather)


UNIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What parameters of a unit may be."""


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
        self._splits: list[SplitOperator] = []
        self._replicas: Replicas | None = None
        self._module: nn.Module | None = None
        self._shards = Shards({}, self._group)
        self._known: frozenset[nn.Parameter] = frozenset()
        self._shared: _Shared | None = None

    @property
    def collectives_per_step(self) -> int:
        """Of the units, in however many stages each runs, and the buckets of replicated gradients."""
        assert self._replicas is not None
        return sum(unit.num_collectives for unit in self._units) + self._replicas.num_collectives

    @property
    def module(self) -> nn.Module | None:
        """The module that a plan was applied to."""
        return self._module

    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        """See ``Engine.check``."""
        check_initialisable(module)
        check_recomputed(plan.recomputed, module)
        modules = dict(module.named_modules())
        owner: dict[nn.Parameter, str] = {}
        for operator in sharded_operators(plan):
            if operator.name not in modules or not operator.name:
                raise ShardingError(f"the plan shards {operator.name!r}, which is not a submodule of this module")
            if len(operator.slices) > 1:
                check_split(operator, modules[operator.name])
            parameters = _large_parameters(modules[operator.name])
            if not parameters:
                raise ShardingError(f"{operator.name} can't be sharded: all its parameters are small")
            dtypes = sorted({str(parameter.dtype) for parameter in parameters})
            if len(dtypes) > 1:
                raise ShardingError(
                    f"{operator.name} holds {' and '.join(dtypes)}: a unit's parameters are of one type"
                )
            for parameter in parameters:
                if parameter in owner:
                    raise ShardingError(
                        f"{operator.name} and {owner[parameter]} share a parameter: both can't shard it"
                    )
                owner[parameter] = operator.name
        for name, parameter in module.named_parameters(remove_duplicate=False):
            home = owner.get(parameter)
            if home is not None and not name.startswith(home + "."):
                raise ShardingError(f"{home} can't be sharded: its parameter is also {name}, outside of it")
            if home is not None and parameter.dtype not in UNIT_DTYPES:
                raise ShardingError(f"{name} is {parameter.dtype}: units hold float32, bfloat16 or float16")

    def apply(self, module: nn.Module, plan: ExecutionPlan, optimizers: Iterable[Optimizer] = ()) -> None:
        """See ``Engine.apply``. The module is never whole on the device: operators are moved and sharded in turn."""
        self.check(module, plan)
        self._module = module
        self._shared = _Shared(self._device, self._group, plan)
        names = {p: n for n, p in module.named_parameters()}
        layouts: dict[nn.Parameter, Layout] = {}
        initialiser = Initialiser(module, self._device, self._group)
        for operator in sharded_operators(plan):
            line = self._shared.lines.of(operator.choice)
            body = module.get_submodule(operator.name)
            initialiser.fill(body)
            parameters = _large_parameters(body)
            for parameter in parameters:
                self._place(parameter)
                layouts[parameter] = Layout.sharded(parameter.shape, line.group)
            again = any(operator.name == name or operator.name.startswith(name + ".") for name in plan.recomputed)
            make_unit = self._unit_maker(line, again)
            if len(operator.slices) == 1:
                make_unit(body, parameters, Mode(operator.slices[0]))
            else:
                split = SplitOperator(body, operator, line.group, make_unit)
                layouts[split.handle] = split.layout
                self._splits.append(split)
        initialiser.fill(module)
        for name in plan.recomputed:
            recompute(module.get_submodule(name))
        for tensor in [p for p in names if p not in layouts] + list(module.buffers()):
            self._place(tensor)
        self._shards = Shards(layouts, self._group)
        self.take_in(optimizers)
        slices = {split.handle: split.replicated for split in self._splits}
        replicated = [r for p in module.parameters() for r in slices.get(p, [p] if p not in layouts else [])]
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

    @contextmanager
    def whole_parameters(self, module: nn.Module | None = None, writeback: bool = True) -> Iterator[None]:
        """See ``Engine.whole_parameters``."""
        assert self._module is not None
        assert self._shared is not None
        if self._shared.shown_whole or any(unit.in_use for unit in self._units):
            raise ShardingError(
                "parameters can't be made whole where they are already: between forward and backward, or within itself"
            )
        self._shared.shown_whole = True
        try:
            with self._shards.whole_values_shown((module or self._module).parameters(), writeback):
                yield
        finally:
            self._shared.shown_whole = False
            self.after_optimizer_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See ``Engine.no_sync``."""
        if self._replicas is None or self._shared is None:
            yield
            return
        with self._replicas.no_sync(), self._shared.lines.between.no_sync():
            yield

    def before_forward(self) -> None:
        """Takes in what changed since the last step: parameters that were unfrozen."""
        for split in self._splits:
            split.follow()
        if self._replicas is not None:
            self._replicas.refresh()

    def finish_backward(self) -> None:
        """See ``Engine.finish_backward``. Frees units that a backward pass did not reach (frozen, or without loss)."""
        assert self._replicas is not None
        assert self._shared is not None
        for split in self._splits:
            split.before_reductions_end()
        self._replicas.finish()
        self._shared.lines.between.finish()
        for unit in self._units:
            unit.end_backward()
        for split in self._splits:
            split.collect()

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

    def _unit_maker(
        self, line: Line, recomputed: bool
    ) -> Callable[[nn.Module | Stage, list[nn.Parameter], Mode], None]:
        assert self._shared is not None
        shared = self._shared

        def make(stage: nn.Module | Stage, parameters: list[nn.Parameter], mode: Mode) -> None:
            self._units.append(_Unit(stage, parameters, mode, line, shared, recomputed))

        return make

    def _place(self, tensor: Tensor) -> None:
        """Moves a parameter or buffer to the device, in place, with rank 0's values."""
        tensor.data = tensor.data.to(self._device)
        dist.broadcast(tensor.data, src=dist.get_global_rank(self._group, 0), group=self._group)


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


@contextmanager
def _seen_as_float16(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Within it, bfloat16 parameters pass for float16, bit by bit: FairScale knows no other 16-bit type.

    It cuts them up there and computes nothing; what it gathers later is of the unit's ``compute_dtype``.
    """
    halves = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter in halves:
        parameter.data = parameter.data.view(torch.float16)
    yield
    for parameter in halves:
        parameter.data = parameter.data.view(torch.bfloat16)


class _Unit(FullyShardedDataParallel):  # type: ignore[misc]
    """One FairScale instance around one operator, sharing streams, reducer and the bound on gathers with all others."""

    _shared: _Shared

    def __init__(
        self,
        stage: nn.Module | Stage,
        parameters: list[nn.Parameter],
        mode: Mode,
        line: Line,
        shared: _Shared,
        recomputed: bool = False,
    ) -> None:
        body = _Body(stage.forward, parameters)
        dtype = parameters[0].dtype
        with _seen_as_float16(parameters):
            super().__init__(
                body,
                process_group=line.gather,
                process_group_reduce_scatter=line.reduce,
                reshard_after_forward=mode == Mode.ZDP,
                disable_reshard_on_root=False,
                flatten_parameters=False,
                bucket_cap_mb=0,
                compute_dtype=parameters[0].dtype,
                compute_device=shared.device,
                clear_autocast_cache=True,
            )
        self.compute_dtype = self.buffer_dtype = dtype
        self._shared = shared
        self._between = line.between
        self._streams = shared.streams
        self._reducer = shared.reducer
        self._output_pre_backward_hook_registered: list[int] = []
        self._recomputed = recomputed
        self._in_graph = self._backward_done = False
        stage.forward = self.forward

    @property
    def num_collectives(self) -> int:
        """In one step: a gather for each pass that needs one, a reduce-scatter, and an all-reduce between nodes.

        Of a recomputed block, the unit with which its backward begins gathers once less: see the note above.
        """
        if self.world_size == 1:
            return 0
        gathers = 2 + int(self._recomputed) if self._orig_reshard_after_forward else 1
        reductions = 2 if self._between is not None else 1
        return sum(gathers + reductions * int(p.requires_grad) for p in self.params)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's forward with whole parameters; outside of training they are freed at once in every mode."""
        if self._shared.shown_whole:
            raise ShardingError("the model can't run while its parameters are shown whole: leave that context first")
        if self._in_graph and torch._C._current_graph_task_id() != -1:  # -1: no backward pass is going on
            return self._run_again(*args, **kwargs)
        outputs = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._in_graph, self._backward_done = True, False
        else:
            self.release()
        return outputs

    def _run_again(self, *args: Any, **kwargs: Any) -> Any:
        """See Note [a forward inside the backward]."""
        was_whole, amid_backward = self.has_full_params, self.training_state == TrainingState.BACKWARD_PRE
        self._rebuild_full_params()
        try:
            return self.module(*args, **kwargs)
        finally:
            if not was_whole:
                self._free_full_params()
            if not amid_backward:
                self._use_fp32_param_shard()
            torch.clear_autocast_cache()

    def end_backward(self) -> None:
        """To be called when a backward pass is over, whether or not it reached this unit."""
        self._in_graph = self._in_graph and not self._backward_done
        self.release()

    def _wait_for_post_backward(self) -> None:
        super()._wait_for_post_backward()
        self._backward_done = True

    def _use_full_params(self) -> None:
        # Freed where another backward pass ended between this unit's forward and its backward.
        self._rebuild_full_params()
        super()._use_full_params()

    @property
    def in_use(self) -> bool:
        """Whether its parameters are whole now."""
        return bool(self.has_full_params and self.world_size > 1)

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

    def _post_reduction_hook(self, param: nn.Parameter, reduced_grad: Tensor) -> None:
        if self._between is None:
            super()._post_reduction_hook(param, reduced_grad)
            return
        self._between.before_accumulation(param)
        super()._post_reduction_hook(param, reduced_grad)
        self._between.shard_ready(param, param._saved_grad_shard)  # type: ignore[attr-defined]

    def _free_full_params(self, params: Any = None) -> None:
        was_whole = self.has_full_params
        super()._free_full_params(params)
        if was_whole:
            self._shared.gathers.after_free()


class _Shared:
    """What all units of one engine have in common.

    Args:
        device: of the rank.
        group: all ranks.
        plan: says whether nodes matter, and how many there are.
    """

    def __init__(self, device: torch.device, group: Any, plan: ExecutionPlan) -> None:
        self.device = device
        # Reductions of their own: their order is fixed, that of the units' collectives follows autograd.
        self.replica_group = duplicate(group)
        self.parameters_changed = True
        self.shown_whole = False
        self.reducer = _Reducer()
        self.lines = Lines(group, device, [op.choice for op in sharded_operators(plan)], plan.cluster)
        if device.type == "cuda":
            names = ("fp32_to_fp16", "all_gather", "post_backward")
            self.streams: dict[str, Any] = {
                name: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for name in names
            }
            self.gathers: GatherBound | NoBound = GatherBound(GATHERS_IN_FLIGHT)
        else:
            run_without_cuda(fairscale_module)
            self.streams = dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), NO_STREAM)
            self.gathers = NoBound()


class _Reducer:
    """Stands in for FairScale's bucketing reducer, which copies every gradient once more than needed."""

    def reduce_scatter_async(
        self, input_list: list[Tensor], group: Communicator, callback_fn: Callable[[Tensor], None]
    ) -> None:
        """Sums ``input_list[i]`` over the ranks onto rank i and hands the result to ``callback_fn``."""
        whole = _joined(input_list)
        output = torch.empty_like(input_list[0])
        group.reduce_scatter(output, whole)
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
