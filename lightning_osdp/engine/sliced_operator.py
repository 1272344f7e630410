"""Sliced operators: a large product as a sum (or a row) of small ones, so that only one slice is ever gathered.

Note [the full parameter]: the weight that the user, the optimizer and the state dict know keeps its identity. It holds
this rank's part of every slice, one after the other, flat (``FlatPaddedLayout``). The slices' own parameters are not
registered anywhere; their data are views of the full parameter's, so an optimizer that updates the one updates them.

Note [gradients of a sliced weight]: between backward passes they are the full parameter's alone, flat like its data:
who frees or zeroes them there has done so for all slices. When a backward pass reaches a slice, the slice's gradient
becomes a view of the full parameter's, if there is one, so that accumulation adds in place. When the pass is complete,
new gradients are copied to the full parameter's slice by slice, each freed at once.

Note [one slice at a time]: a product that is cut along its input multiplies the slices one after the other into the
same output. The backward pass visits them in reverse, and computes a slice's weight gradient before it goes on to the
next slice. A slice is freed before its gradient is computed (``sliced_matmul``), in the last of the operator's runs.
The input is cut by one ``torch.split``: the backward of a ``narrow`` for each slice makes a full-size zero gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from lightning_osdp.engine import sliced_matmul
from lightning_osdp.engine.replaced_method import replace_method
from lightning_osdp.engine.splittable import matrix_input_dim, split_dims, table_unsplittable_reason
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode, slice_sizes
from lightning_osdp.planning.spec.model import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.state.flat_layout import FlatPaddedLayout
from lightning_osdp.state.guarded_parameter import opened, without_guards

OWN_FUNCTIONS_LACK = frozenset({TransformType.Grad, TransformType.Vmap, TransformType.Jvp})
"""Transforms that an autograd function of ours does not take part in."""


class ForwardStage:
    """A part of an operator's forward with parameters of its own; a unit that runs it replaces ``forward``."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward
        self.free_full_params: Callable[[], None] | None = None
        """Frees the gathered parameters in the middle of a backward pass; set by the unit."""


MakeUnit = Callable[[ForwardStage, list[nn.Parameter], Mode], None]
"""Shards the parameters, which keep their identity, and has the stage's forward run with them gathered."""


class WeightSlice(ForwardStage):
    """One slice of a weight: its parameter, and the product with it.

    Args:
        full_parameter: the operator's weight.
        weight: values of this slice.
        product: (weight, *inputs, on_weight_unused=...) -> output, as in ``sliced_matmul``.
        is_table: whether rows are looked up in it, so that the product reads no cast.
    """

    def __init__(
        self, full_parameter: nn.Parameter, weight: Tensor, product: Callable[..., Tensor], is_table: bool
    ) -> None:
        super().__init__(self._run)
        self.weight = nn.Parameter(weight, requires_grad=full_parameter.requires_grad)
        self.full_parameter, self.is_table = full_parameter, is_table
        self.on_gradient_reduced: Callable[[], bool] = lambda: False
        """Called when this slice's gradient is reduced; returns whether the full parameter's is complete now."""
        self.read_weight: Callable[[], Tensor] = lambda: self.weight
        """Returns what the product reads; its unit may gather a cast of the weight."""
        self._product = product
        self._range = slice(0, 0)
        self._backward_reached = False
        self._num_pending_runs = 0

    def bind_to_full_parameter(self, begin: int, end: int) -> None:
        """Make the weight a view of elements ``begin`` to ``end`` of the full parameter, which get its values."""
        self._range = slice(begin, end)
        view = self._view_of(self.full_parameter.data)
        view.copy_(self.weight.data)
        self.weight.data = view

    def rebind(self) -> None:
        """Make the weight a view of the full parameter's data, which are in new memory."""
        self.weight.data = self._view_of(self.full_parameter.data)

    def sync_requires_grad(self) -> None:
        """Train or freeze the slice as the full parameter is."""
        requires_grad = self.full_parameter.requires_grad
        if self.weight.requires_grad != requires_grad:
            self.weight.requires_grad_(requires_grad)

    def bind_gradient(self, *_: object) -> None:
        """Have the slice's first gradient of a backward pass add to the gradient of the full parameter."""
        with without_guards():
            if not self._backward_reached and self.full_parameter.grad is not None and self.weight.grad is None:
                self.weight.grad = self._view_of(self.full_parameter.grad)
        self._backward_reached = True

    def store_gradient(self) -> None:
        """Move the gradient to the full parameter's, unless it is a view of it already."""
        gradient, self.weight.grad = self.weight.grad, None
        self._backward_reached, self._num_pending_runs = False, 0
        if gradient is None:
            return
        assert self.full_parameter.grad is not None
        target = self._view_of(self.full_parameter.grad)
        if gradient.data_ptr() != target.data_ptr():
            target.copy_(gradient)

    def _view_of(self, flat: Tensor) -> Tensor:
        return flat.detach().view(-1)[self._range].view(self.weight.shape)

    def _run(self, *inputs: Any) -> Tensor:
        output = self._product(self.read_weight(), *inputs, on_weight_unused=self._on_weight_unused)
        if output.requires_grad:
            self._num_pending_runs += 1
            # Before the unit's own hook, which is registered when this returns: hooks run in that order.
            output.register_hook(self.bind_gradient)  # type: ignore[no-untyped-call]
        return output

    def _on_weight_unused(self) -> None:
        """Free the gathered weight in the backward of its last run."""
        self._num_pending_runs -= 1
        if self._num_pending_runs <= 0 and self.free_full_params is not None and self.weight.requires_grad:
            self.free_full_params()


class SlicedOperator:
    """Replaces the forward of an operator by one that runs its slices one after the other.

    Args:
        operator: a Linear, an Embedding or a Conv1D of transformers, its parameters in full and on the device.
        plan: the slices' modes; at least one slice is sharded. A bias too large to be replicated gets the mode of the
            first sharded slice.
        group: the ranks to shard over.
        make_unit: shards a stage.
    """

    def __init__(self, operator: nn.Module, plan: OperatorPlan, group: Any, make_unit: MakeUnit) -> None:
        assert isinstance(operator.weight, nn.Parameter)
        assert plan.split_dim is not None
        self.full_parameter = operator.weight
        shape, self._modes = operator.weight.shape, plan.slices
        sizes = slice_sizes(shape[plan.split_dim], len(plan.slices))
        is_sharded = [mode != Mode.DP for mode in plan.slices]
        self.layout = FlatPaddedLayout.create_sliced(shape, plan.split_dim, sizes, is_sharded, group)
        self._own_parameters, self._bias_parameter = operator._parameters, operator._parameters.get("bias")
        self._unsliced_forward = operator.forward
        self._forward, product = self._select_forward(operator)
        self._slices = self._create_slices(product, isinstance(operator, nn.Embedding), make_unit)
        self._num_gradients_reduced = 0
        for weight_slice in self._slices:
            weight_slice.on_gradient_reduced = self._on_slice_reduced
        first_sharded_mode = next(mode for mode in plan.slices if mode != Mode.DP)
        self._bias = self._make_bias_stage(operator, first_sharded_mode, make_unit)
        replace_method(operator, "forward", self.forward)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The slices' parameters."""
        return [weight_slice.weight for weight_slice in self._slices]

    @property
    def replicated_weights(self) -> list[nn.Parameter]:
        """The parameters of those slices that every rank holds."""
        return [weight for weight, mode in zip(self.weights, self._modes, strict=True) if mode == Mode.DP]

    def rebind(self) -> None:
        """Have the slices use the weight's new memory."""
        for weight_slice in self._slices:
            weight_slice.rebind()

    def sync_requires_grad(self) -> None:
        """Train or freeze the slices as the weight is, before a forward."""
        for weight_slice in self._slices:
            weight_slice.sync_requires_grad()

    def bind_remaining_gradients(self) -> None:
        """Show earlier gradients in those slices that this backward pass did not reach."""
        for weight_slice in self._slices:
            weight_slice.bind_gradient()

    def gather_slice_gradients(self) -> None:
        """Make the slices' gradients the weight's, once reductions are complete. Idempotent."""
        self._num_gradients_reduced = 0
        is_missing = [weight.grad is None for weight in self.weights]
        if self.full_parameter.grad is None and not all(is_missing):
            new = torch.zeros_like if any(is_missing) else torch.empty_like
            with opened([self.full_parameter]):
                self.full_parameter.grad = new(self.full_parameter.data)
        for weight_slice in self._slices:
            weight_slice.store_gradient()

    def _on_slice_reduced(self) -> bool:
        """Count slices whose gradient is reduced; the last one completes the weight's.

        Replicated slices never come here: their gradients are reduced by the end of the backward pass.
        """
        self._num_gradients_reduced += 1
        if self._num_gradients_reduced < len(self._slices):
            return False
        self.gather_slice_gradients()
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the operator slice by slice, unless another weight has been put in the place of its own."""
        own = self._own_parameters
        if own.get("weight") is not self.full_parameter or own.get("bias") is not self._bias_parameter:
            return self._unsliced_forward(*args, **kwargs)  # type: ignore[no-any-return]
        refuse_transforms("an operator runs in slices", OWN_FUNCTIONS_LACK)
        (x,) = (*args, *kwargs.values())
        self.sync_requires_grad()
        return self._forward(x)

    def _select_forward(self, operator: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
        """Return the forward of the operator and the product with one slice."""
        if isinstance(operator, nn.Embedding):
            return self._look_up, partial(_read_rows, operator)
        input_dim = matrix_input_dim(operator)
        is_input_cut = self.layout.dim == input_dim
        forward = self._multiply_input_slices if is_input_cut else self._multiply_output_slices
        return forward, partial(sliced_matmul.multiply, transposed=input_dim != 0)

    def _create_slices(self, product: Callable[..., Tensor], is_table: bool, make_unit: MakeUnit) -> list[WeightSlice]:
        full, slices = self.full_parameter.data, []
        for place, mode in zip(self.layout.slices, self._modes, strict=True):
            values = full.narrow(self.layout.dim, place.start, place.size)
            copy = values.clone(memory_format=torch.contiguous_format)
            slices.append(WeightSlice(self.full_parameter, copy, product, is_table))
            if mode != Mode.DP:
                make_unit(slices[-1], [slices[-1].weight], mode)
        self.full_parameter.data = full.new_empty(self.layout.local_shard_numel)
        for weight_slice, (_, begin, end) in zip(slices, self.layout.slice_ranges(), strict=True):
            weight_slice.bind_to_full_parameter(begin, end)
        return slices

    @staticmethod
    def _make_bias_stage(operator: nn.Module, mode: Mode, make_unit: MakeUnit) -> ForwardStage | None:
        bias = operator._parameters.get("bias")
        if bias is None:
            return None
        # Cast first: where types differ, torch copies both operands into tensors of the wider one, the result as well.
        stage = ForwardStage(lambda y: y.add_(cast_for_autocast(bias)))
        if bias.numel() >= SMALL_PARAMETER_ELEMENTS:
            make_unit(stage, [bias], mode)
        return stage

    def _multiply_input_slices(self, x: Tensor) -> Tensor:
        """Return the sum of the slices' products with x (..., in), cut along ``in``."""
        rows = cast_for_autocast(x.reshape(-1, x.shape[-1]))  # (n, in)
        y: Tensor | None = None
        columns_by_slice = torch.split(rows, [place.size for place in self.layout.slices], dim=1)
        for columns, weight_slice in zip(columns_by_slice, self._slices, strict=True):
            y = weight_slice.forward(columns, y)  # (n, out)
        assert y is not None
        return self._add_bias(y).view(*x.shape[:-1], y.shape[1])

    def _multiply_output_slices(self, x: Tensor) -> Tensor:
        """Return the slices' products with x (..., in), concatenated."""
        rows = cast_for_autocast(x.reshape(-1, x.shape[-1]))  # (n, in)
        y = torch.cat([weight_slice.forward(rows, None) for weight_slice in self._slices], dim=1)  # (n, out)
        return self._add_bias(y).view(*x.shape[:-1], y.shape[1])

    def _look_up(self, ids: Tensor) -> Tensor:
        return torch.cat([weight_slice.forward(ids) for weight_slice in self._slices], dim=-1)  # (..., embedding)

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self._bias is None else self._bias.forward(y)


def _read_rows(table: nn.Embedding, *args: Any, **kwargs: Any) -> Tensor:
    """Look up rows of one slice with the options that the table has now.

    Raises:
        ShardingError: it has got an option that a slice can't be looked up with.
    """
    if reason := table_unsplittable_reason(table):
        raise late_option(f"an Embedding of {table.num_embeddings:,} rows is split into slices", reason)
    options = {"padding_idx": table.padding_idx, "scale_grad_by_freq": table.scale_grad_by_freq} | kwargs
    return sliced_matmul.read_rows(*args, **options)


def late_option(what: str, reason: str) -> ShardingError:
    """Return the error that says that a table has got an option which its plan does not allow."""
    return ShardingError(
        f"{what}, but {reason}, which was not so when the plan was made: set the option before fit, so that the plan "
        "takes it into account"
    )


def refuse_transforms(reason: str, kinds: Collection[TransformType]) -> None:
    """Refuse to run in a transform of ``torch.func`` that does not allow what gathers a sharded operator's weights."""
    has_transforms = torch._C._functorch.peek_interpreter_stack() is not None
    is_refused = TransformType.Jvp in kinds and forward_ad._current_level >= 0
    if has_transforms and not is_refused:
        is_refused = any(transform.key() in kinds for transform in retrieve_all_functorch_interpreters())
    if is_refused:
        what = "torch.func" if has_transforms else "forward-mode differentiation"
        raise ShardingError(
            f"{what} can't transform what a sharded module does: {reason}. Give it the weights, as in "
            "torch.func.functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, inputs)"
        )


def check_slicing(operator: OperatorPlan, module: nn.Module) -> None:
    """Refuse a split that the module does not allow.

    Raises:
        ShardingError: says what can't be done and what can.
    """
    dims, reason = split_dims(module)
    if operator.split_dim not in dims:
        why = reason or f"it can be along {' or '.join(map(str, dims))}"
        raise ShardingError(f"{operator.name} can't be split along dimension {operator.split_dim} of its weight: {why}")
    assert isinstance(module.weight, Tensor)
    size = module.weight.shape[operator.split_dim]
    if len(operator.slices) > size:
        raise ShardingError(
            f"{operator.name} can't be split into {len(operator.slices)} slices: "
            f"dimension {operator.split_dim} of its weight has {size} elements"
        )


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast as autocast would for a matrix product, once instead of once for each slice."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device_type))
    return x
