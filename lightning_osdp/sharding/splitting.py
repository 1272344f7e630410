"""Split operators: a large product as a sum (or a row) of small ones, so that only one slice is ever gathered.

Note [the handle]: the weight that the user, the optimizer and the state dict know keeps its identity. It holds this
rank's part of every slice, one after the other, flat (``Layout``). The slices' own parameters are not registered
anywhere; their data are views of the handle's, so an optimizer that updates the handle updates them.

Note [gradients of a split weight]: between backward passes they are the handle's alone, flat like its data: who frees
or zeroes them there has done so for all slices. When a backward pass reaches a slice, the slice's gradient becomes a
view of the handle's, if there is one, so that accumulation adds in place. When the pass is complete, new gradients are
copied to the handle's slice by slice, each freed at once.

Note [one slice at a time]: a cut along the input multiplies the slices one after the other into the same output. The
backward pass visits them in reverse, and takes a slice's weight gradient before it goes on to the next slice. A slice
is freed before its gradient is made (``products``), once the last of the operator's runs has come so far.
``torch.split`` once, not ``narrow`` for each slice: the backward of ``narrow`` makes a full-size zero gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.choices import Mode, slice_sizes
from lightning_osdp.planning.operators import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.plan import OperatorPlan
from lightning_osdp.sharding import products
from lightning_osdp.sharding.layout import Layout
from lightning_osdp.splittable import matrix_input_dim, split_dims


class Stage:
    """A part of an operator's forward with parameters of its own; a unit that runs it replaces ``forward``.

    Attributes:
        free: frees the whole parameters amid a backward pass; the unit sets it.
    """

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward
        self.free: Callable[[], None] | None = None


MakeUnit = Callable[[Stage, list[nn.Parameter], Mode], None]
"""Shards the parameters, keeping the objects, and has the stage's forward run with them whole."""


class WeightSlice(Stage):
    """One slice of a weight: its parameter, and the product with it.

    Args:
        handle: the whole operator's weight.
        weight: this slice of it, whole.
        product: (weight, *inputs, over=...) -> outputs, as in ``products``.
    """

    def __init__(self, handle: nn.Parameter, weight: Tensor, product: Callable[..., Tensor]) -> None:
        super().__init__(self._run)
        self.weight = nn.Parameter(weight, requires_grad=handle.requires_grad)
        self.handle = handle
        self.came: Callable[[], bool] = lambda: False
        """To be called when its gradient is reduced: whether the handle's is complete now. The operator sets it."""
        self._product = product
        self._range = slice(0, 0)
        self._reached = False
        self._runs = 0

    def move_in(self, first: int, last: int) -> None:
        """Makes the weight a view of elements ``first`` to ``last`` of the handle, which get its values."""
        self._range = slice(first, last)
        view = self._part(self.handle.data)
        view.copy_(self.weight.data)
        self.weight.data = view

    def follow(self) -> None:
        """Is trained or frozen as the handle is."""
        if self.weight.requires_grad != self.handle.requires_grad:
            self.weight.requires_grad_(self.handle.requires_grad)

    def take_gradient(self, *_: object) -> None:
        """Once in a backward pass, before it has a gradient: adds to what the handle has."""
        if not self._reached and self.handle.grad is not None and self.weight.grad is None:
            self.weight.grad = self._part(self.handle.grad)
        self._reached = True

    def give_gradient(self) -> None:
        """Copies the gradient to the handle's, unless it lies there already, and lets go of it."""
        gradient, self.weight.grad, self._reached, self._runs = self.weight.grad, None, False, 0
        if gradient is None:
            return
        assert self.handle.grad is not None
        place = self._part(self.handle.grad)
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)

    def _part(self, flat: Tensor) -> Tensor:
        return flat.detach().view(-1)[self._range].view(self.weight.shape)

    def _run(self, *inputs: Any) -> Tensor:
        output = self._product(self.weight, *inputs, over=self._over)
        if output.requires_grad:
            self._runs += 1
            # Before the unit's own hook, which is registered when this returns: hooks run in that order.
            output.register_hook(self.take_gradient)  # type: ignore[no-untyped-call]
        return output

    def _over(self) -> None:
        """The backward of one run needs the weight no longer."""
        self._runs -= 1
        if self._runs <= 0 and self.free is not None and self.weight.requires_grad:
            self.free()


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Frees the memory of parameters that are of no use any more. FairScale's hooks tie them to autograd's nodes, where
    Python's collector does not see them: they would stay."""
    for parameter in parameters:
        vars(parameter).clear()
        parameter.data = parameter.data.new_empty(0)


class SplitOperator:
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
        self.handle = operator.weight
        shape, modes = operator.weight.shape, plan.slices
        sizes = slice_sizes(shape[plan.split_dim], len(modes))
        self.layout = Layout.split(shape, plan.split_dim, sizes, [mode != Mode.DP for mode in modes], group)
        self._forward, product = self._forms(operator)
        self._slices = self._cut(product, modes, make_unit)
        self._modes = modes
        self._came = 0
        for part in self._slices:
            part.came = self._one_more_came
        self._bias = self._bias_stage(operator, next(mode for mode in modes if mode != Mode.DP), make_unit)
        operator.forward = self.forward

    @property
    def replicated(self) -> list[nn.Parameter]:
        """The slices that every rank holds."""
        return [part.weight for part in self._replicated_slices()]

    def forget(self) -> None:
        """Frees the slices: they are views of the weight, and are in no module's parameters."""
        forget(part.weight for part in self._slices)

    def follow(self) -> None:
        """To be called before a forward: slices are trained or frozen as the weight is."""
        for part in self._slices:
            part.follow()

    def before_reductions_end(self) -> None:
        """Slices that this backward pass did not reach show what they have from earlier ones."""
        for part in self._slices:
            part.take_gradient()

    def collect(self) -> None:
        """Once reductions are complete: the slices' gradients become the weight's. Idempotent."""
        self._came = 0
        missing = [part.weight.grad is None for part in self._slices]
        if self.handle.grad is None and not all(missing):
            new = torch.zeros_like if any(missing) else torch.empty_like
            self.handle.grad = new(self.handle.data)
        for part in self._slices:
            part.give_gradient()

    def _one_more_came(self) -> bool:
        """One more slice has its gradient, reduced; the last one's makes the weight's. Replicated ones have theirs when
        the backward pass is over."""
        self._came += 1
        if self._came < len(self._slices):
            return False
        self.collect()
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator's forward, slice by slice."""
        (x,) = (*args, *kwargs.values())
        self.follow()
        return self._forward(x)

    def _forms(self, operator: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
        """The forward as a whole and the product with one slice."""
        if isinstance(operator, nn.Embedding):
            padding, by_frequency = operator.padding_idx, operator.scale_grad_by_freq
            return self._look_up, partial(products.look_up, padding=padding, by_frequency=by_frequency)
        input_dim = matrix_input_dim(operator)
        return (
            self._multiply_inputs if self.layout.dim == input_dim else self._multiply_outputs,
            partial(products.multiply, transposed=input_dim != 0),
        )

    def _cut(self, product: Callable[..., Tensor], modes: Sequence[Mode], make_unit: MakeUnit) -> list[WeightSlice]:
        whole, slices = self.handle.data, []
        for piece, mode in zip(self.layout.slices, modes, strict=True):
            weight = whole.narrow(self.layout.dim, piece.start, piece.stop - piece.start)
            slices.append(WeightSlice(self.handle, weight.clone(memory_format=torch.contiguous_format), product))
            if mode != Mode.DP:
                make_unit(slices[-1], [slices[-1].weight], mode)
        self.handle.data = whole.new_empty(self.layout.part_numel)
        for part, (_, first, last) in zip(slices, self.layout.ranges(), strict=True):
            part.move_in(first, last)
        return slices

    @staticmethod
    def _bias_stage(operator: nn.Module, mode: Mode, make_unit: MakeUnit) -> Stage | None:
        bias = operator._parameters.get("bias")
        if bias is None:
            return None
        stage = Stage(lambda y: y.add_(bias))
        if bias.numel() >= SMALL_PARAMETER_ELEMENTS:
            make_unit(stage, [bias], mode)
        return stage

    def _replicated_slices(self) -> list[WeightSlice]:
        return [part for part, mode in zip(self._slices, self._modes, strict=True) if mode == Mode.DP]

    def _multiply_inputs(self, x: Tensor) -> Tensor:
        """x (..., in) cut along ``in``: the sum of the slices' products."""
        rows = _as_autocast(x.reshape(-1, x.shape[-1]))  # (n, in)
        sizes = [piece.stop - piece.start for piece in self.layout.slices]
        y: Tensor | None = None
        for columns, part in zip(torch.split(rows, sizes, dim=1), self._slices, strict=True):
            y = part.forward(columns, y)  # (n, out)
        assert y is not None
        return self._with_bias(y).view(*x.shape[:-1], y.shape[1])

    def _multiply_outputs(self, x: Tensor) -> Tensor:
        """x (..., in): the slices' products side by side."""
        rows = _as_autocast(x.reshape(-1, x.shape[-1]))  # (n, in)
        y = torch.cat([part.forward(rows, None) for part in self._slices], dim=1)  # (n, out)
        return self._with_bias(y).view(*x.shape[:-1], y.shape[1])

    def _look_up(self, ids: Tensor) -> Tensor:
        return torch.cat([part.forward(ids) for part in self._slices], dim=-1)  # (..., embedding)

    def _with_bias(self, y: Tensor) -> Tensor:
        return y if self._bias is None else self._bias.forward(y)


def check_split(operator: OperatorPlan, module: nn.Module) -> None:
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


def _as_autocast(x: Tensor) -> Tensor:
    """As autocast would hand it to a matrix product; once, not once for each slice."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
