"""A unit of tensor parallelism: one operator, or those of a scope, which the ranks of a group run together.

Note [a run]: it starts with a few numbers that the ranks of a group exchange on the host: whether each runs the unit,
how many rows it has, and what its arguments look like. If all run it alike, each computes with its slices for the rows
of all. Otherwise those that run it gather the weights, and each computes for itself; the others take part in that.

Note [joining]: what a rank does not run it joins, since collectives have one order on all ranks of all groups
(``CollectiveOrder``). Only the start of a run and the reduction of gradients of whole weights need it, since a run with
slices is one of all ranks of the group; another group may be in it without this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch.optim import Optimizer

from lightning_osdp.backend.row_collectives import exchange_numbers
from lightning_osdp.engine.replaced_method import replace_method
from lightning_osdp.engine.sliced_operator import refuse_transforms
from lightning_osdp.engine.tensor_parallel.exchange import Part, read_whole
from lightning_osdp.engine.tensor_parallel.groups import TensorGroups
from lightning_osdp.engine.tensor_parallel.operator import TensorOperator
from lightning_osdp.engine.tensor_parallel.runs import Run, SlicedRun, WholeRun
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.tensor import TensorRole
from lightning_osdp.state.guarded_parameter import GuardContext, ShardGuard, local_data, without_guards
from lightning_osdp.state.state_dict import ShardedParameters

_BACKWARD_PARTS = (Part.OUTPUT_GRADIENT, Part.INPUT_GRADIENT, Part.WEIGHT_GRADIENT)

_ABSENT = (0, 0, 0, 0, 0)
"""What a rank says at the start of a run in which it only joins: is present, signature, needs gradients, two counts."""


class Order(Protocol):
    """The order of collectives of all units."""

    def register(self, unit: Any) -> int:
        """Return the index of ``unit``."""

    def before_gather(self, unit: int, in_backward: bool, indices: Sequence[int] = ()) -> None:
        """Return when the next collective on all ranks is this one."""

    def prefetch_next(self) -> None:
        """Start what comes next."""


@dataclass(frozen=True)
class UnitContext:
    """What all units share.

    Attributes:
        order: the order of collectives.
        check_run: raises where the module must not run.
    """

    order: Order
    check_run: Callable[[], None]


class TensorUnit:
    """Operators that are tensor parallel together.

    Args:
        name: the operator's name, or that of the scope.
        operators: their weights are in full and on the device.
        groups: the ranks that hold all slices, and those that hold the same one.
        context: what all units share.
    """

    units: tuple[()] = ()
    sliced_operator = None

    def __init__(
        self, name: str, operators: Sequence[TensorOperator], groups: TensorGroups, context: UnitContext
    ) -> None:
        self.label, self.operators, self.groups = name, operators, groups
        self._context = context
        self._index = context.order.register(self)
        self._own_forwards = [(module, vars(module).get("forward")) for module in self._replaced_modules()]
        self._joined_gradients: dict[nn.Parameter, Tensor] = {}
        self._num_open_runs = 0
        self.has_new_gradients = False
        self.layouts = {operator.weight: operator.layout for operator in operators}
        for weight, layout in self.layouts.items():
            weight.data, weight.grad = layout.shard(weight.data), None
        self._install()

    def _replaced_modules(self) -> list[nn.Module]:
        """Return the modules whose forward is replaced."""
        return [operator.module for operator in self.operators]

    def _install(self) -> None:
        """Replace the forwards."""
        raise NotImplementedError

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        own = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not all(operator.has_own_weights for operator in self.operators):
                return own(*args, **kwargs)  # others have been put in their place, as ``functional_call`` does
            refuse_transforms("an operator is tensor parallel", {TransformType.Grad, TransformType.Vmap})
            return forward(own, *args, **kwargs)

        replace_method(module, "forward", run)

    @property
    def num_collectives(self) -> int:
        """Number of collectives in one step: numbers, the two of the forward and of the backward, all-reduces."""
        exchanges = 4 if self.operators[0].role == TensorRole.EMBEDDING else 5
        return exchanges + (len(self.operators) if self.groups.replicas.size() > 1 else 0)

    # Runs

    def start(self, num_rows: Sequence[int], alike: str, needs_grad: int = 0) -> tuple[Run, list[list[int]]]:
        """Start a run, and return it with the numbers of rows of all ranks. Collective; see Note [a run].

        Args:
            num_rows: this rank's numbers of rows, one or two; those of a run with slices are the first.
            alike: what has to be equal on all ranks for a run with slices; empty if nothing is.
            needs_grad: bit i is set if the rows that are gathered as number i need gradients.
        """
        self._context.check_run()
        self._announce(Part.START)
        signature = crc32(alike.encode()) + 1 if alike else 0
        own = (1, signature, needs_grad, *num_rows)
        answers = exchange_numbers(own + _ABSENT[len(own) :], self.groups.host)
        counts = [[answer[3 + i] for answer in answers] for i in range(len(num_rows))]
        if not signature or any(answer[:2] != [1, signature] for answer in answers):
            return WholeRun(self._read_whole()), counts
        if torch.is_grad_enabled() and not _is_in_backward():
            self._num_open_runs += 1
        self._context.order.prefetch_next()
        needed = reduce(or_, (answer[2] for answer in answers))
        return SlicedRun(counts[0], self.groups.slices, self._announce, needed), counts

    def _read_whole(self) -> dict[TensorOperator, Tensor]:
        weights = [operator.weight for operator in self.operators]
        full = read_whole(weights, self._gather_whole, self._reduce_whole)
        return dict(zip(self.operators, full, strict=True))

    def _gather_whole(self) -> list[Tensor]:
        return [layout.unshard(local_data(weight)) for weight, layout in self.layouts.items()]

    def _reduce_whole(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's slices of the gradients of all ranks, of which each has full ones."""
        self._announce(Part.WEIGHT_GRADIENT)
        exchange_numbers([1], self.groups.host)
        return self._scatter_gradients(gradients)

    def _scatter_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        layouts = zip(self.layouts.values(), gradients, strict=True)
        return [layout.reduce_scatter(gradient).div_(self.groups.degree) for layout, gradient in layouts]

    def _announce(self, part: Part) -> None:
        """Return when all ranks are in this part of a run."""
        self._context.order.before_gather(self._index, _is_in_backward(), (part,))
        if part in _BACKWARD_PARTS:
            self.has_new_gradients = True
        if part == Part.OUTPUT_GRADIENT:
            self._num_open_runs -= 1

    def announce_output(self) -> None:
        """Return when all ranks are about to sum and scatter outputs."""
        self._announce(Part.OUTPUT)

    def begin_step(self) -> None:
        """Forget runs of an earlier step whose backward did not come."""
        self._num_open_runs = 0

    # What other ranks run; see Note [joining]

    def join_gather(self, indices: Sequence[int]) -> None:
        """Take part in a part of a run of other ranks.

        Raises:
            ShardingError: this rank has run the unit, but its loss does not depend on it.
        """
        part = Part(indices[0])
        with without_guards(), torch.no_grad():
            if part == Part.START:
                if self._is_present(_ABSENT):
                    self._gather_whole()
            elif part == Part.WEIGHT_GRADIENT:
                if self._is_present([0]):
                    self._join_gradients()
            elif part in _BACKWARD_PARTS and self._num_open_runs > 0:
                raise ShardingError(
                    f"{self.label} is tensor parallel and all ranks have run it, but the loss of some does not depend "
                    "on it. Let it depend on it on all ranks, or train without: OSDPCallback(tensor_parallel=False)"
                )
        if part in _BACKWARD_PARTS:
            self.has_new_gradients = True

    def _is_present(self, numbers: Sequence[int]) -> bool:
        """Return whether any rank of the group runs what this one joins."""
        return any(answer[0] for answer in exchange_numbers(numbers, self.groups.host))

    def _join_gradients(self) -> None:
        zeros = [local_data(w).new_zeros(layout.shape) for w, layout in self.layouts.items()]
        for weight, gradient in zip(self.layouts, self._scatter_gradients(zeros), strict=True):
            earlier = self._joined_gradients.get(weight)
            self._joined_gradients[weight] = gradient if earlier is None else earlier.add_(gradient)

    def join_reduction(self, indices: Sequence[int]) -> None:
        """Do nothing: there is none."""

    def start_prefetch(self) -> None:
        """Do nothing: inputs are not known before."""

    def show_joined_gradients(self) -> None:
        """Add the gradients of reductions that this rank has joined, when its step is over."""
        for weight, gradient in self._joined_gradients.items():
            if weight.requires_grad:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._joined_gradients.clear()

    # The life of the unit

    def create_guards(self, names: Mapping[nn.Parameter, str], context: GuardContext) -> list[ShardGuard]:
        """Guard the weights, which are slices now."""

        def rebind(weight: nn.Parameter, shard: Tensor) -> None:
            weight.data = shard

        return [
            ShardGuard(weight, layout, names[weight], context, lambda: None, partial(rebind, weight))
            for weight, layout in self.layouts.items()
        ]

    def unshard(self, optimizers: Iterable[Optimizer]) -> None:
        """Gather weights and their optimizer states for good and restore the modules. Collective."""
        for optimizer in optimizers:
            ShardedParameters(self.layouts, None).unshard_state(optimizer)
        for weight, layout in self.layouts.items():
            weight.data, weight.grad = layout.unshard(weight.data), None
        self._restore_forwards()

    def release_slices(self) -> None:
        """Do nothing: all weights are those of modules."""

    @contextmanager
    def use_original_forward(self) -> Iterator[None]:
        """Give the modules the forwards that their user knows within a context, to be looked at."""
        replaced = [(module, vars(module)["forward"]) for module in self._replaced_modules()]
        self._restore_forwards()
        try:
            yield
        finally:
            for module, forward in replaced:
                vars(module)["forward"] = forward

    def _restore_forwards(self) -> None:
        for module, forward in self._own_forwards:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
