"""Operators that are tensor parallel by themselves: outputs come back to the ranks whose rows they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_osdp.backend.row_collectives import gather_rows
from lightning_osdp.engine.sliced_operator import cast_for_autocast
from lightning_osdp.engine.tensor_parallel.check import table_refusal
from lightning_osdp.engine.tensor_parallel.exchange import read_slice, share_gradient
from lightning_osdp.engine.tensor_parallel.operator import Bags, TensorOperator
from lightning_osdp.engine.tensor_parallel.operator_run import SlicedRun
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.tensor import TensorRole


class SingleUnit(TensorUnit):
    """A Linear or Conv1D cut along its output features, or a table cut along its columns, or its rows."""

    def _install(self) -> None:
        (operator,) = self.operators
        forwards = {nn.Embedding: self._look_up, nn.EmbeddingBag: self._look_up_bags}
        forward = next((f for kind, f in forwards.items() if isinstance(operator.module, kind)), self._multiply)
        self._replace_forward(operator.module, forward)

    def _multiply(self, own: Any, input: Tensor) -> Tensor:
        """Return the product with x (..., in)."""
        (operator,) = self.operators
        rows = cast_for_autocast(input.reshape(-1, input.shape[-1]))
        run, _ = self.start([len(rows)], f"{rows.dtype} {rows.shape[1]}", int(rows.requires_grad), rows)
        y = operator.multiply(run.gather(rows), run.weight_of(operator), run.bias_of(operator))
        return run.to_rows(y).view(*input.shape[:-1], operator.out_features)

    def _look_up(self, own: Any, input: Tensor) -> Tensor:
        """Return the rows of the table for indices (...)."""
        (operator,) = self.operators
        _check_options(operator)
        ids = input.reshape(-1)
        run, _ = self.start([len(ids)], str(ids.dtype), rows=ids)
        ids, ranks = run.gather(ids), self.groups.degree
        if not isinstance(run, SlicedRun):
            values = operator.look_up(ids, run.weight_of(operator))
        elif operator.role == TensorRole.TABLE_ROWS:
            values = run.scatter(share_gradient(operator.look_up_own_rows(ids, read_slice(operator.weight, 1)), ranks))
        else:  # fewer values are looked up than there are gradients
            values = run.to_rows(share_gradient(operator.look_up(ids, read_slice(operator.weight, 1)), ranks))
        return values.view(*input.shape, operator.out_features)

    def _look_up_bags(
        self, own: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one row for each bag of indices."""
        (operator,) = self.operators
        _check_options(operator)
        _check_bags(operator.module, input, offsets, per_sample_weights)
        _check_last_offset(operator, input, offsets)
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
        shares_values = isinstance(run, SlicedRun) and bags.weights is None  # whose gradient would be divided, too
        weight = read_slice(operator.weight, 1) if shares_values else run.weight_of(operator)
        rows = operator.look_up_bags(bags, weight)
        rows = run.to_rows(share_gradient(rows, self.groups.degree) if shares_values else rows)
        return rows[:-1] if has_end else rows  # the last one is what comes after the last bag


def _check_options(operator: TensorOperator) -> None:
    """Refuse options that a table has got since the plan was made."""
    if reason := table_refusal(operator.module):
        raise ShardingError(
            f"{operator.name} is tensor parallel, but {reason}, which was not so when the plan was made: train without "
            "tensor parallelism, OSDPCallback(tensor_parallel=False)"
        )


def _check_bags(module: Any, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
    """Raise what torch raises for arguments that say nothing, before they are mixed with those of other ranks."""
    is_wrong = (offsets is None) != (ids.dim() == 2) or (weights is not None and weights.shape != ids.shape)
    is_wrong |= weights is not None and module.mode != "sum"
    is_wrong |= offsets is not None and offsets.dim() != 1
    if not is_wrong and offsets is not None and not offsets.is_cuda and len(offsets):
        is_wrong |= bool(offsets[0] != 0) or bool(offsets[-1] > len(ids))
    if is_wrong:
        narrow = torch.zeros(1, 1, device=ids.device).expand(module.num_embeddings, 1)
        functional.embedding_bag(
            ids,
            narrow,
            offsets,
            mode=module.mode,
            per_sample_weights=weights,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )


def _check_last_offset(operator: TensorOperator, ids: Tensor, offsets: Tensor | None) -> None:
    """Refuse indices behind the last bag, which torch counts in or out of it by mode and padding."""
    bag: Any = operator.module
    if offsets is None or not bag.include_last_offset or offsets.is_cuda or not len(offsets):
        return
    if (end := int(offsets[-1])) < len(ids):
        raise ShardingError(
            f"{operator.name} is tensor parallel, has include_last_offset=True, and was given {len(ids)} indices, but "
            f"its last offset is {end}: it has to be the number of indices, else torch itself does not say in which "
            "bag the rest is. Leave out the rest, or train without tensor parallelism, "
            "OSDPCallback(tensor_parallel=False)"
        )
