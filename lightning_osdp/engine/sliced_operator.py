"""Split operators: a large product as a sum (or a row) of small ones, so that only one slice is ever gathered.

Note [the handle]: the weight that the user, the optimizer and the state dict know keeps its identity. It holds this
rank's part of every slice, one after the other, flat (``ShardLayout``). The slices' own parameters are not registered
anywhere; their data are views of the handle's, so an optimizer that updates the handle updates them.

Note [gradients of a split weight]: between backward passes they are the handle's alone, flat like its data: who frees
or zeroes them there has done so for all slices. When a backward pass reaches a slice, the slice's gradient becomes a
view of the handle's, if there is one, so that accumulation adds in place. When the pass is complete, new gradients are
copied to the handle's slice by slice, each freed at once.

Note [one slice at a time]: a cut along the input multiplies the slices one after the other into the same output. The
backward pass visits them in reverse, and takes a slice's weight gradient before it goes on to the next slice. A slice
is freed before its gradient is made (``replaced_kernels``), once the last of the operator's runs has come so far.
``torch.split`` once, not ``fix_by_reduced_cost`` for each slice: the backward of ``fix_by_reduced_cost`` makes a full-size zero gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.engine import sliced_matmul
from lightning_osdp.engine.splittable import matrix_input_dim, split_dims
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode, slice_sizes
from lightning_osdp.planning.spec.model import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.state.flat_layout import FlatPaddedLayout


class ForwardStage:
    """A part of an operator's forward with parameters of its own; a unit that runs it replaces ``forward``.

    Attributes:
        free_full_params: frees the whole parameters amid a backward pass; the unit sets it.
    """

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward
        self.free_full_params: Callable[[], None] | None = None


MakeUnit = Callable[[ForwardStage, list[nn.Parameter], Mode], None]
"""Shards the parameters, keeping the objects, and has the stage's forward run with them whole."""


class WeightSlice(ForwardStage):
    """One slice of a weight: its parameter, and the product with it.

    Args:
        full_parameter: the whole operator's weight.
        weight: this slice of it, whole.
        product: (weight, *inputs, on_weight_unused=...) -> outputs, as in ``replaced_kernels``.
    """

    def __init__(self, full_parameter: nn.Parameter, weight: Tensor, product: Callable[..., Tensor]) -> None:
        super().__init__(self._run)
        self.weight = nn.Parameter(weight, requires_grad=full_parameter.requires_grad)
        self.full_parameter = full_parameter
        self.on_gradient_reduced: Callable[[], bool] = lambda: False
        """To be called when its gradient is reduced: whether the handle's is complete now. The operator sets it."""
        self._product = product
        self._range = slice(0, 0)
        self._backward_reached = False
        self._num_pending_runs = 0

    def bind_to_full_parameter(self, first: int, last: int) -> None:
        """Makes the weight a view of elements ``shard_offset`` to ``last`` of the handle, which get its values."""
        self._range = slice(first, last)
        view = self._slice_view(self.full_parameter.data)
        view.copy_(self.weight.data)
        self.weight.data = view

    def sync_requires_grad(self) -> None:
        """Is trained or frozen as the handle is."""
        if self.weight.requires_grad != self.full_parameter.requires_grad:
            self.weight.requires_grad_(self.full_parameter.requires_grad)

    def bind_gradient(self, *_: object) -> None:
        """Once in a backward pass, before it has a gradient: adds to what the handle has."""
        if not self._backward_reached and self.full_parameter.grad is not None and self.weight.grad is None:
            self.weight.grad = self._slice_view(self.full_parameter.grad)
        self._backward_reached = True

    def store_gradient(self) -> None:
        """Copies the gradient to the handle's, unless it lies there already, and lets go of it."""
        gradient, self.weight.grad, self._backward_reached, self._num_pending_runs = self.weight.grad, None, False, 0
        if gradient is None:
            return
        assert self.full_parameter.grad is not None
        place = self._slice_view(self.full_parameter.grad)
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)

    def _slice_view(self, flat: Tensor) -> Tensor:
        return flat.detach().view(-1)[self._range].view(self.weight.shape)

    def _run(self, *inputs: Any) -> Tensor:
        output = self._product(self.weight, *inputs, on_weight_unused=self._on_weight_unused)
        if output.requires_grad:
            self._num_pending_runs += 1
            # Before the unit's own hook, which is registered when this returns: hooks run in that order.
            output.register_hook(self.bind_gradient)  # type: ignore[no-untyped-call]
        return output

    def _on_weight_unused(self) -> None:
        """The backward of one run needs the weight no longer."""
        self._num_pending_runs -= 1
        if self._num_pending_runs <= 0 and self.free_full_params is not None and self.weight.requires_grad:
            self.free_full_params()


def release_storage(parameters: Iterable[nn.Parameter]) -> None:
    """Frees the memory of parameters that are of no use any more. FairScale's hooks tie them to autograd's nodes, where
    Python's collector does not see them: they would stay."""
    for parameter in parameters:
        vars(parameter).clear()
        parameter.data = parameter.data.new_empty(0)


class SlicedOperator:
    """Replaces the forward of an operator by one that runs its slices one after the other.

    Args:
        operator: a Linear, an Embedding or a Conv1D of transformers, its parameters whole and on the device.
        plan: which slices, at least one of them sharded. A bias too large to be replicated goes with the first such.
        group: the ranks to shard over.
        make_unit: shards a stage.
    """

    def __init__(self, operator: nn.Module, plan: OperatorPlan, group: Any, make_unit: MakeUnit) -> None:
        assert isinstance(operator.weight, nn.Parameter)
        assert plan.split_dim is not None
        self.full_parameter = operator.weight
        shape, modes = operator.weight.shape, plan.slices
        sizes = slice_sizes(shape[plan.split_dim], len(modes))
        self.layout = FlatPaddedLayout.create_sliced(
            shape, plan.split_dim, sizes, [mode != Mode.DP for mode in modes], group
        )
        self._forward, product = self._select_forward(operator)
        self._slices = self._create_slices(product, modes, make_unit)
        self._modes = modes
        self._num_gradients_reduced = 0
        for part in self._slices:
            part.on_gradient_reduced = self._on_slice_reduced
        self._bias = self._make_bias_stage(operator, next(mode for mode in modes if mode != Mode.DP), make_unit)
        operator.forward = self.forward

    @property
    def replicated_weights(self) -> list[nn.Parameter]:
        """The slices that every rank holds."""
        return [part.weight for part in self._replicated_slices()]

    def release_storage(self) -> None:
        """Frees the slices: they are views of the weight, and are in no module's parameters."""
        release_storage(part.weight for part in self._slices)

    def sync_requires_grad(self) -> None:
        """To be called before a forward: slices are trained or frozen as the weight is."""
        for part in self._slices:
            part.sync_requires_grad()

    def bind_remaining_gradients(self) -> None:
        """Slices that this backward pass did not reach show what they have from earlier ones."""
        for part in self._slices:
            part.bind_gradient()

    def gather_slice_gradients(self) -> None:
        """Once reductions are complete: the slices' gradients become the weight's. Idempotent."""
        self._num_gradients_reduced = 0
        missing = [part.weight.grad is None for part in self._slices]
        if self.full_parameter.grad is None and not all(missing):
            new = torch.zeros_like if any(missing) else torch.empty_like
            self.full_parameter.grad = new(self.full_parameter.data)
        for part in self._slices:
            part.store_gradient()

    def _on_slice_reduced(self) -> bool:
        """One more slice has its gradient, reduced; the last one's makes the weight's. Replicated ones have theirs when
        the backward pass is over."""
        self._num_gradients_reduced += 1
        if self._num_gradients_reduced < len(self._slices):
            return False
        self.gather_slice_gradients()
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator's forward, slice by slice."""
        (x,) = (*args, *kwargs.values())
        self.sync_requires_grad()
        return self._forward(x)

    def _select_forward(self, operator: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
        """The forward as a whole and the product with one slice."""
        if isinstance(operator, nn.Embedding):
            padding, by_frequency = operator.padding_idx, operator.scale_grad_by_freq
            return self._look_up, partial(
                sliced_matmul.embedding_slice, padding_idx=padding, scale_grad_by_freq=by_frequency
            )
        input_dim = matrix_input_dim(operator)
        return (
            self._multiply_input_slices if self.layout.dim == input_dim else self._multiply_output_slices,
            partial(sliced_matmul.multiply, transposed=input_dim != 0),
        )

    def _create_slices(
        self, product: Callable[..., Tensor], modes: Sequence[Mode], make_unit: MakeUnit
    ) -> list[WeightSlice]:
        whole, slices = self.full_parameter.data, []
        for piece, mode in zip(self.layout.slices, modes, strict=True):
            weight = whole.narrow(self.layout.dim, piece.start, piece.stop - piece.start)
            slices.append(
                WeightSlice(self.full_parameter, weight.clone(memory_format=torch.contiguous_format), product)
            )
            if mode != Mode.DP:
                make_unit(slices[-1], [slices[-1].weight], mode)
        self.full_parameter.data = whole.new_empty(self.layout.local_shard_numel)
        for part, (_, first, last) in zip(slices, self.layout.slice_ranges(), strict=True):
            part.bind_to_full_parameter(first, last)
        return slices

    @staticmethod
    def _make_bias_stage(operator: nn.Module, mode: Mode, make_unit: MakeUnit) -> ForwardStage | None:
        bias = operator._parameters.get("bias")
        if bias is None:
            return None
        stage = ForwardStage(lambda y: y.add_(bias))
        if bias.numel() >= SMALL_PARAMETER_ELEMENTS:
            make_unit(stage, [bias], mode)
        return stage

    def _replicated_slices(self) -> list[WeightSlice]:
        return [part for part, mode in zip(self._slices, self._modes, strict=True) if mode == Mode.DP]

    def _multiply_input_slices(self, x: Tensor) -> Tensor:
        """x (..., in) cut along ``in``: the sum of the slices' products."""
        rows = _cast_for_autocast(x.reshape(-1, x.shape[-1]))  # (n, in)
        sizes = [piece.stop - piece.start for piece in self.layout.slices]
        y: Tensor | None = None
        for columns, part in zip(torch.split(rows, sizes, dim=1), self._slices, strict=True):
            y = part.forward(columns, y)  # (n, out)
        assert y is not None
        return self._add_bias(y).view(*x.shape[:-1], y.shape[1])

    def _multiply_output_slices(self, x: Tensor) -> Tensor:
        """x (..., in): the slices' products side by side."""
        rows = _cast_for_autocast(x.reshape(-1, x.shape[-1]))  # (n, in)
        y = torch.cat([part.forward(rows, None) for part in self._slices], dim=1)  # (n, out)
        return self._add_bias(y).view(*x.shape[:-1], y.shape[1])

    def _look_up(self, ids: Tensor) -> Tensor:
        return torch.cat([part.forward(ids) for part in self._slices], dim=-1)  # (..., embedding)

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self._bias is None else self._bias.forward(y)


def check_slicing(operator: OperatorPlan, module: nn.Module) -> None:
    """Refuses a split that the module does not allow.

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


def _cast_for_autocast(x: Tensor) -> Tensor:
    """As autocast would hand it to a matrix product; once, not once for each slice."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
