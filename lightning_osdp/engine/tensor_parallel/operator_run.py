"""How operators run: each rank with its slices for the rows of all, or each for its own rows with whole weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from lightning_osdp.engine.tensor_parallel.exchange import RowExchange, read_slice
from lightning_osdp.engine.tensor_parallel.operator import TensorOperator
from lightning_osdp.state.guarded_parameter import guard_of


class OperatorRun(Protocol):
    """One run of operators. See ``RowExchange``."""

    def gather(self, rows: Tensor, index: int = 0) -> Tensor:
        """Return the rows that this rank computes."""
        ...

    def scatter(self, rows: Tensor) -> Tensor:
        """Return the outputs of this rank's rows, of partial sums."""
        ...

    def to_rows(self, columns: Tensor) -> Tensor:
        """Return the outputs of this rank's rows, of some of their columns."""
        ...

    def weight_of(self, operator: TensorOperator) -> Tensor:
        """Return the weight to compute with."""
        ...

    def bias_of(self, operator: TensorOperator) -> Tensor | None:
        """Return the bias of the outputs that this rank computes."""
        ...


class SlicedRun(RowExchange):
    """A run with this rank's slices."""

    def weight_of(self, operator: TensorOperator) -> Tensor:
        """See ``OperatorRun.weight_of``."""
        return read_slice(operator.weight, len(self.counts))

    def bias_of(self, operator: TensorOperator) -> Tensor | None:
        """See ``OperatorRun.bias_of``."""
        return operator.bias_slice


class WholeRun:
    """A run of this rank alone with gathered weights, where ranks differ in what they run.

    Args:
        weights: full weights.
    """

    def __init__(self, weights: Mapping[TensorOperator, Tensor]) -> None:
        self._weights = weights
        self._num_writes = {operator: _num_writes(operator) for operator in weights}

    def gather(self, rows: Tensor, index: int = 0) -> Tensor:
        """See ``OperatorRun.gather``."""
        return rows

    def scatter(self, rows: Tensor) -> Tensor:
        """See ``OperatorRun.scatter``."""
        return rows

    to_rows = scatter

    def weight_of(self, operator: TensorOperator) -> Tensor:
        """See ``OperatorRun.weight_of``."""
        if _num_writes(operator) != self._num_writes[operator]:
            guard = guard_of(operator.weight)
            assert guard is not None
            raise guard.refusal("it was changed after what runs together with it had begun, by a hook of it")
        return self._weights[operator]

    def bias_of(self, operator: TensorOperator) -> Tensor | None:
        """See ``OperatorRun.bias_of``."""
        return operator.bias


def _num_writes(operator: TensorOperator) -> int:
    guard = guard_of(operator.weight)
    return 0 if guard is None else guard.num_writes
