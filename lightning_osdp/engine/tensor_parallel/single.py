"""Operators that are tensor parallel by themselves: outputs come back to the ranks whose rows they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.backend.row_collectives import gather_rows
from lightning_osdp.engine.sliced_operator import cast_for_autocast
from lightning_osdp.engine.tensor_parallel.operator import Bags
from lightning_osdp.engine.tensor_parallel.operator_run import SlicedRun
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit


class SingleUnit(TensorUnit):
    """A Linear or Conv1D cut along its output features, or a table cut along its columns."""

    def _install(self) -> None:
        (operator,) = self.operators
        forwards = {nn.Embedding: self._look_up, nn.EmbeddingBag: self._look_up_bags}
        forward = next((f for kind, f in forwards.items() if isinstance(operator.module, kind)), self._multiply)
        self._replace_forward(operator.module, forward)

    def _multiply(self, own: Any, input: Tensor) -> Tensor:
        """Return the product with x (..., in)."""
        (operator,) = self.operators
        rows = cast_for_autocast(input.reshape(-1, input.shape[-1]))
        run, _ = self.start([len(rows)], str(rows.dtype), int(rows.requires_grad), rows)
        y = operator.multiply(run.gather(rows), run.weight_of(operator), run.bias_of(operator))
        return run.to_rows(y).view(*input.shape[:-1], operator.out_features)

    def _look_up(self, own: Any, input: Tensor) -> Tensor:
        """Return the rows of the table for indices (...)."""
        (operator,) = self.operators
        ids = input.reshape(-1)
        run, _ = self.start([len(ids)], str(ids.dtype), rows=ids)
        values = operator.look_up(run.gather(ids), run.weight_of(operator))
        return run.to_rows(values).view(*input.shape, operator.out_features)

    def _look_up_bags(
        self, own: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one row for each bag of indices."""
        (operator,) = self.operators
        if (offsets is None) != (input.dim() == 2):
            return own(input, offsets, per_sample_weights)  # type: ignore[no-any-return]  # which says what is wrong
        bags = Bags.create(input, offsets, per_sample_weights)
        weights, has_end = bags.weights, offsets is not None and operator.module.include_last_offset
        needs_grad = int(weights is not None and weights.requires_grad)
        alike = f"{bags.ids.dtype} {None if weights is None else weights.dtype}"
        run, (num_bags, num_ids) = self.start([len(bags.starts), len(bags.ids)], alike, needs_grad)
        if isinstance(run, SlicedRun):
            group = self.groups.slices
            starts = torch.split(gather_rows(bags.starts, num_bags, group), num_bags)
            first = [sum(num_ids[:rank]) for rank in range(len(num_ids))]
            if weights is not None:
                weights = replace(run, counts=num_ids).gather(weights)
            shifted = torch.cat([part + begin for part, begin in zip(starts, first, strict=True)])
            bags = Bags(gather_rows(bags.ids, num_ids, group), shifted, weights)
        rows = run.to_rows(operator.look_up_bags(bags, run.weight_of(operator)))
        return rows[:-1] if has_end else rows  # the last one is what comes after the last bag
