"""A unit of tensor parallelism: one operator, or those of a scope, which the ranks of a group run together.

Note [a run]: it starts with a few numbers that the ranks of a group exchange on the host: whether each runs the unit,
how many rows it has, and what its arguments look like. If all run it alike, each computes with its slices for the rows
of all. Otherwise those that run it gather the weights, and each computes for itself; the others take part in that.

Note [joining]: collectives have one order on all ranks of all groups (``CollectiveOrder``). What a rank does not run it
joins: in the start of a run it says so; the other parts are those of a group whose ranks all run it, so the ranks of
other groups have nothing to do. Such a phase comes when all ranks of its group have come to it.

Note [run numbers]: the phases of a backward pass say which run of the step they belong to, so that ranks which use the
outputs of different runs find out, instead of exchanging gradients of one run with those of another.

Note [whole gradients]: those of whole weights wait until the pass is over, since ranks that differ in what they run
come to them at different times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.backend.row_collectives import exchange_numbers
from lightning_osdp.engine.replaced_method import replace_method
from lightning_osdp.engine.sliced_operator import OWN_FUNCTIONS_LACK, refuse_transforms
from lightning_osdp.engine.splittable import has_parameter_hooks, matrix_input_dim
from lightning_osdp.engine.tensor_parallel.exchange import Phase, read_whole
from lightning_osdp.engine.tensor_parallel.operator import TensorOperator
from lightning_osdp.engine.tensor_parallel.operator_run import OperatorRun, SlicedRun, WholeRun
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups
from lightning_osdp.engine.tensor_parallel.run_start import ABSENT, RunStarts
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.tensor import TensorRole
from lightning_osdp.state.autograd_state import is_in_backward
from lightning_osdp.state.guarded_parameter import GuardContext, ShardGuard, local_data, without_guards
from lightning_osdp.state.state_dict import ShardedParameters

_STARTS = (Phase.START, Phase.START_WITHOUT_GRADIENTS)
_GRADIENTS = (Phase.OUTPUT_GRADIENT, Phase.INPUT_GRADIENT)


class UnitOrder(Protocol):
    """The order of collectives of all units."""

    is_in_training_step: bool
    """Whether the code that runs is that of the traced step."""

    def register(self, unit: Any, is_grouped: bool = False) -> int:
        """Return the index of ``unit``."""

    def before_gather(self, unit: int, in_backward: bool, indices: Sequence[int] = ()) -> None:
        """Return when the next collective on all ranks is this one."""

    def prefetch_next(self) -> None:
        """Start what comes next."""

    def expect_differences(self) -> None:
        """Take nothing for granted in this step, since ranks run different things."""


@dataclass(frozen=True)
class UnitContext:
    """What all units share.

    Attributes:
        order: the order of collectives.
        check_run: raises where the module must not run.
    """

    order: UnitOrder
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
        self._index = context.order.register(self, is_grouped=True)
        self._own_forwards = [(module, vars(module).get("forward")) for module in self._replaced_modules()]
        self._whole_gradients: dict[nn.Parameter, Tensor] = {}
        self._repeatable: set[type] = set()
        self._starts = {phase: RunStarts(groups) for phase in _STARTS}
        self.has_whole_runs = False
        self._num_starts = 0
        self.has_run = self.has_new_gradients = self.is_unsynced = False
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
            refuse_transforms("an operator is tensor parallel", OWN_FUNCTIONS_LACK)
            if kwargs and matrix_input_dim(module) is not None:
                return forward(own, *args, *kwargs.values())  # their classes name the input differently
            return forward(own, *args, **kwargs)

        replace_method(module, "forward", run)

    @property
    def num_collectives(self) -> int:
        """Number of collectives in one step: numbers, the two of the forward and of the backward, all-reduces."""
        exchanges = 4 if self.operators[0].role == TensorRole.EMBEDDING else 5
        return exchanges + (len(self.operators) if self.groups.replicas.size() > 1 else 0)

    # Runs

    def start(
        self, numbers: Sequence[int], alike: str, needs_grad: int = 0, rows: Tensor | None = None
    ) -> tuple[OperatorRun, list[list[int]]]:
        """Start a run, and return it with the numbers of all ranks. Collective; see Note [a run].

        Args:
            numbers: this rank's number of rows, and perhaps another one that ranks tell each other.
            alike: what has to be equal on all ranks for a run with slices; empty if nothing is.
            needs_grad: bit i is set if the rows that are gathered as number i need gradients.
            rows: those that are gathered as number 0, if their number is the first of ``numbers``, and with a second
                number that is equal on all ranks they are alike but for it.
        """
        self._context.check_run()
        phase = Phase.START if torch.is_grad_enabled() else Phase.START_WITHOUT_GRADIENTS
        self._announce(phase)
        if any(has_parameter_hooks(operator.bias) for operator in self.operators):
            alike = ""  # which are to see the gradient of this rank's samples
        is_repeated = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if alike and is_repeated:
            alike += " repeated"  # as checkpoints do: a rank by itself can't run it for the others again
        if alike:
            alike += f" {[operator.weight.requires_grad for operator in self.operators]}"
        signature = crc32(alike.encode()) + 1 if alike else 0
        own = (1, signature, needs_grad, *numbers)
        answers, gathered = self._starts[phase].exchange(own + ABSENT[len(own) :], rows)
        counts = [[answer[3 + i] for answer in answers] for i in range(len(numbers))]
        run: OperatorRun
        if signature and all(answer[:2] == [1, signature] for answer in answers):
            needed = reduce(or_, (answer[2] for answer in answers))
            early, prefetch = [] if gathered is None else [gathered], self._context.order.prefetch_next
            announce = partial(self._announce_gradients, self._num_starts)
            run = SlicedRun(counts[0], self.groups.slices, announce, prefetch, needed, early)
        else:
            run = WholeRun(self._read_whole())
        self._check_repeated(type(run), is_repeated)
        self._context.order.prefetch_next()  # as the ranks of other groups do, whichever way they run it
        return run, counts

    def _check_repeated(self, kind: type, is_repeated: bool) -> None:
        """Refuse a run in the backward pass with whole weights if all that may be repeated there had slices."""
        if is_repeated and not is_in_backward():
            self._repeatable.add(kind)
        elif kind is WholeRun and is_in_backward() and self._repeatable == {SlicedRun}:
            raise ShardingError(
                f"{self.label} is tensor parallel, and ranks recompute it in different order: use "
                "torch.utils.checkpoint for the same modules on all ranks, or train without tensor parallelism, "
                "OSDPCallback(tensor_parallel=False)"
            )

    def _read_whole(self) -> dict[TensorOperator, Tensor]:
        weights = [operator.weight for operator in self.operators]
        full = read_whole(weights, self._gather_whole, self._store_whole_gradients)
        return dict(zip(self.operators, full, strict=True))

    def _gather_whole(self) -> list[Tensor]:
        self.has_whole_runs = True
        self._context.order.expect_differences()
        return [layout.unshard(local_data(weight)) for weight, layout in self.layouts.items()]

    def _store_whole_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for weight, gradient in zip(self.layouts, gradients, strict=True):
            if gradient is not None and weight.requires_grad:
                earlier = self._whole_gradients.get(weight)
                self._whole_gradients[weight] = gradient if earlier is None else earlier + gradient

    @property
    def has_whole_gradients(self) -> bool:
        """Return whether this rank has full gradients that are not reduced yet."""
        return bool(self._whole_gradients)

    def reduce_whole_gradients(self) -> None:
        """Add the slices of full gradients of all ranks of the group when a pass is over. Collective."""
        if not self.has_whole_runs:
            return
        answers = exchange_numbers([int(weight in self._whole_gradients) for weight in self.layouts], self.groups.host)
        for (weight, layout), is_there in zip(self.layouts.items(), zip(*answers, strict=True), strict=True):
            if any(is_there):
                full = self._whole_gradients.pop(weight, None)
                part = layout.reduce_scatter(weight.new_zeros(layout.shape) if full is None else full)
                part = part.div_(self.groups.degree)
                weight.grad = part if weight.grad is None else weight.grad.add_(part)

    def _announce(self, phase: Phase, *called: int) -> None:
        """Return when all ranks are in this phase of a run, in which they have called the same operators."""
        self._context.order.before_gather(self._index, is_in_backward(), (phase, *called))
        self._note(phase)

    def _announce_gradients(self, number: int, phase: Phase) -> None:
        """Announce a phase of the backward pass of the run of that number; see Note [run numbers]."""
        self._announce(phase, number)

    def describe(self, indices: Sequence[int]) -> str:
        """Return the label, with the operators that a run has called, or its number, where ranks tell each other."""
        if self.exchanges_gradients(indices):
            return f"{self.label}, run {indices[1]}," if indices[1] > 1 else self.label
        called = [self.operators[index].name for index in indices[1:]]
        return f"{self.label} (after {', '.join(called)})" if called else self.label

    def exchanges_gradients(self, indices: Sequence[int]) -> bool:
        """Return whether this is a phase of a backward pass."""
        return Phase(indices[0]) in _GRADIENTS

    def _note(self, phase: Phase) -> None:
        """Note what any rank of any group does."""
        self._num_starts += phase == Phase.START
        self.has_run |= phase == Phase.START
        self.has_new_gradients |= phase in _GRADIENTS

    def begin_step(self) -> None:
        """Forget runs of an earlier step, unless their gradients are still to be averaged."""
        self.has_whole_runs, self._num_starts = False, 0
        self._whole_gradients.clear()
        self._repeatable.clear()
        self.has_run &= self.is_unsynced

    def check_complete(self) -> None:
        """Refuse a pass of a run of which a part has not run. There is none unless several operators run together."""

    # What other ranks run; see Note [joining]

    def join_gather(self, indices: Sequence[int]) -> None:
        """Take phase in a phase of a run of other ranks."""
        phase = Phase(indices[0])
        self._note(phase)
        if phase in _STARTS:
            with without_guards(), torch.no_grad():
                answers, _ = self._starts[phase].exchange(ABSENT)
                if any(is_present for is_present, *_ in answers):
                    self._gather_whole()

    def can_run(self, ranks: Collection[int], indices: Sequence[int]) -> bool:
        """Return whether this phase of a run is complete with these ranks: all of a group, or of each of several."""
        if Phase(indices[0]) in _STARTS:
            return True
        groups = Counter(rank // self.groups.degree for rank in ranks)
        return all(count == self.groups.degree for count in groups.values())

    def join_reduction(self, indices: Sequence[int]) -> None:
        """Do nothing: there is none."""

    def start_prefetch(self) -> None:
        """Do nothing: inputs are not known before."""

    # The life of the unit

    def create_guards(self, names: Mapping[nn.Parameter, str], context: GuardContext) -> list[ShardGuard]:
        """Guard the weights, which are slices now."""

        def rebind(weight: nn.Parameter, shard: Tensor) -> None:
            weight.data = shard

        return [
            ShardGuard(weight, layout, names[weight], context, lambda: None, partial(rebind, weight), is_cut=True)
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
