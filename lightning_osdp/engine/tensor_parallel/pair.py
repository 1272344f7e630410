"""Column operators and the row operators that their outputs lead to, with code between them that mixes no rows.

Between them a rank has some features of the rows of all ranks: one rank's samples after the other's along the first
dimension, or, where ranks have sequences of other lengths, all rows in two dimensions. It was proven that the code
between does what it does without a cut on both (``profiling.tensor_proof``). Ranks that begin with different column
operators are in different runs. Those that go on with different ones can't be: they find out before outputs are summed.

The proof is about the training step. Other code (validation, hooks) may use what is between: it gets whole weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lightning_osdp.engine.sliced_operator import cast_for_autocast
from lightning_osdp.engine.tensor_parallel.check import shows_slices
from lightning_osdp.engine.tensor_parallel.exchange import Phase
from lightning_osdp.engine.tensor_parallel.inner_features import InnerFeatures, InnerRun
from lightning_osdp.engine.tensor_parallel.operator import TensorOperator
from lightning_osdp.engine.tensor_parallel.operator_run import OperatorRun, SlicedRun
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.tensor import TensorRole
from lightning_osdp.state.autograd_state import is_in_backward
from lightning_osdp.state.guarded_parameter import without_guards


class PairUnit(TensorUnit):
    """Gathers the input of its column operators once, and scatters the outputs of its row operators."""

    inner_modules: Sequence[nn.Module] = ()
    """Modules that may run between the operators, which nobody saw when the plan was made."""
    places: Sequence[tuple[nn.Module, str, nn.Module | None]] = ()
    """Where its operators, and what runs between them, were when the plan was made: parent, name and module."""
    functions: Sequence[str] | None = None
    """Functions that may see what is between its operators; None if that is not known."""
    _run: OperatorRun | None = None
    """The run that has started, until the last row operator has ended it."""
    _input: Tensor | None = None
    """What the column operators of the run have been given."""
    _input_version = 0
    """How often that had been changed in place."""
    _gathered: Tensor | None = None
    """That of all ranks, if all are in the run."""
    _inner: InnerRun | None = None
    """Guards what is between the operators of a run with slices."""
    _is_recomputed = False
    """Whether the run has started in a backward pass."""
    _is_flat = False
    """Whether rows have two dimensions between the operators, whatever they have outside."""

    def _install(self) -> None:
        self._called: set[TensorOperator] = set()
        self._begun: WeakKeyDictionary[InnerRun, tuple[SlicedRun, torch.Size | None]] = WeakKeyDictionary()
        self._rows = [operator for operator in self.operators if operator.role == TensorRole.ROW]
        for operator in self.operators:
            forward = self._run_row if operator.role == TensorRole.ROW else self._run_column
            self._replace_forward(operator.module, partial(forward, operator))

    def begin_step(self) -> None:
        """See ``TensorUnit.begin_step``."""
        super().begin_step()
        self._end_run()

    def check_complete(self) -> None:
        """See ``TensorUnit.check_complete``. What is recomputed may end early."""
        if isinstance(self._run, SlicedRun) and not self._is_recomputed:
            raise self._incomplete_run(next(iter(self._called), self.operators[0]))

    def _run_column(self, operator: TensorOperator, own: Any, input: Tensor) -> Tensor:
        """Return the output features of this rank for the rows of all ranks."""
        if self._run is None or not self._is_known(input) or operator in self._called:
            self._start_run(operator, input)
        self._called.add(operator)
        assert self._run is not None
        assert self._gathered is not None
        return self._guard(
            operator.multiply(self._gathered, self._run.weight_of(operator), self._run.bias_of(operator))
        )

    def _is_known(self, input: Tensor) -> bool:
        return input is self._input and self._input_version == version_of(input)

    def _guard(self, features: Tensor) -> Tensor:
        if isinstance(self._run, SlicedRun):
            if self._inner is None:
                index, degree = self.groups.slices.rank(), self.groups.degree
                self._inner = InnerRun(self.label, self.functions, index, degree)
                shape = self._input.shape[:-1] if self._is_flat and self._input is not None else None
                self._begun[self._inner] = self._run, shape
            self._inner.needs_grad |= features.requires_grad
            self._inner.guard(features)
        return features

    def _start_run(self, operator: TensorOperator, input: Tensor) -> None:
        """Gather the rows (samples, ..., in) of all ranks that begin with the same operator."""
        self._begin_run()
        x = cast_for_autocast(input)
        numbers = [len(x), x.shape[1:-1].numel()]
        run, (samples, lengths) = self.start(numbers, self._describe(operator, x), int(x.requires_grad), x)
        if isinstance(run, SlicedRun) and len(set(lengths)) > 1:
            rows = [count * length for count, length in zip(samples, lengths, strict=True)]
            run, x, self._is_flat = replace(run, counts=rows), x.reshape(-1, x.shape[-1]), True
        self._run, self._input, self._gathered = run, input, run.gather(x)
        self._input_version = version_of(input)

    def _begin_run(self) -> None:
        self.check_complete()
        self._end_run()
        self._is_recomputed = is_in_backward()

    @property
    def _shows_slices(self) -> bool:
        """Return whether hooks, what has replaced a forward since, or code that was not traced would see slices."""
        if not (self._context.order.is_in_training_step or is_in_backward()):
            return True
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            return True
        if any(parent._modules.get(name) is not module for parent, name, module in self.places):
            return True
        return any(map(shows_slices, (*self.inner_modules, *(operator.module for operator in self.operators))))

    def _describe(self, operator: TensorOperator, x: Tensor) -> str:
        """Return what has to be equal on all ranks, or nothing where each has to run with whole weights."""
        if x.dim() < 2 or self._shows_slices:
            return ""
        return f"{operator.name} {x.dtype} {x.dim()} {x.shape[2:]} {x.shape[-1]}"

    def _run_row(self, operator: TensorOperator, own: Any, input: Tensor) -> Tensor:
        """Return the output for this rank's rows, of this rank's input features for the rows of all ranks."""
        if is_in_backward() and isinstance(input, InnerFeatures) and input.run is not self._inner:
            return self._run_row_again(operator, input)
        if self._inner is not None or isinstance(input, InnerFeatures):
            input = (self._inner or InnerRun(self.label)).take(input)
        run, first, is_flat = self._run, self._input, self._is_flat
        if run is None and input.shape[-1] == operator.in_features:  # whole features: it is called by itself
            run, _ = self.start([len(input), 1], "")
        if run is None:
            raise self._incomplete_run(operator)
        self._called.add(operator)
        called = [index for index, each in enumerate(self.operators) if each in self._called]
        if self._called.issuperset(self._rows):
            self._end_run()
        return self._scatter(operator, run, input, called, first.shape[:-1] if is_flat and first is not None else None)

    def _run_row_again(self, operator: TensorOperator, features: InnerFeatures) -> Tensor:
        """Return the output once more, since it is recomputed while its column operators are not."""
        if features.run not in self._begun:
            raise features.run.refusal(f"{operator.name}, when it is recomputed,")
        run, shape = self._begun[features.run]
        with without_guards():
            input = features.view_as(features)
        return self._scatter(operator, run, input, [self.operators.index(operator)], shape)

    def _scatter(
        self, operator: TensorOperator, run: OperatorRun, input: Tensor, called: list[int], shape: torch.Size | None
    ) -> Tensor:
        """Return the output for this rank's rows, in the shape (..., out) of what it began with if rows are flat."""
        y = operator.multiply(cast_for_autocast(input), run.weight_of(operator), None)
        if isinstance(run, SlicedRun):
            if len(y) != sum(run.counts):
                raise ShardingError(f"{operator.name} got {len(y)} rows, {sum(run.counts)} were gathered for it")
            self._announce(Phase.OUTPUT, *called)
        y = run.scatter(y)
        if isinstance(run, SlicedRun):
            run.prefetch()
        if operator.bias is not None:
            y = y + operator.bias.to(y.dtype)
        return y if shape is None else y.view(*shape, operator.out_features)

    def _incomplete_run(self, operator: TensorOperator) -> ShardingError:
        others = ", ".join(each.name for each in self.operators if each is not operator)
        return ShardingError(
            f"{operator.name} is tensor parallel together with {others}, but runs without: train without tensor "
            "parallelism, OSDPCallback(tensor_parallel=False)"
        )

    def _end_run(self) -> None:
        self._run = self._input = self._gathered = None
        if self._inner is not None:
            self._inner.is_over, self._inner = True, None
        self._is_flat = False
        self._called.clear()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, if autograd counts that."""
    return -1 if tensor.is_inference() else tensor._version
