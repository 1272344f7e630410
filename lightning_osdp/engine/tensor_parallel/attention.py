"""``nn.MultiheadAttention``: each rank computes some of its heads, for the samples of all ranks.

The module makes its projections by itself, in one function that knows no slices. So what it does is done here for some
heads. Where ranks differ in lengths or in which masks they have, each runs the module's own code with whole weights.

Note [masks]: one of keys has a row for each sample, and is gathered like the samples. One of queries and keys, which
all samples of a rank share, may be another one on each rank.

Note [averaged weights]: those of all heads are summed together with the output, as further columns of it, so that their
gradients need no exchange of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_osdp.engine.sliced_operator import cast_for_autocast
from lightning_osdp.engine.tensor_parallel.dropout import drop_apart
from lightning_osdp.engine.tensor_parallel.exchange import Phase
from lightning_osdp.engine.tensor_parallel.operator_run import OperatorRun, SlicedRun
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit
from lightning_osdp.state.dim_slice_layout import DimSliceLayout


class AttentionCall(NamedTuple):
    """Arguments of a MultiheadAttention, in the order of its forward."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors that are projected."""
        return self.query, self.key, self.value

    @property
    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask of keys, and that of queries and keys."""
        return self.key_padding_mask, self.attn_mask

    @property
    def is_causal_alone(self) -> bool:
        """Return whether the call asks for nothing but causal attention, so that torch need not read the mask."""
        return self.is_causal and self.key_padding_mask is None and not self.need_weights

    def refusal(self, attention: nn.MultiheadAttention) -> str:
        """Say why the call can't be made with some heads for the samples of all ranks; empty if it can."""
        if any(x.is_nested or x.dim() != 3 for x in self.inputs):
            return "it is given a sequence without a dimension for samples"
        if self.need_weights and not self.average_attn_weights:
            return "it returns the weights of each head"
        if self.attn_mask is not None and self.attn_mask.dim() == 3:
            return "its mask has other numbers for each head"
        batch, length = (0, 1) if attention.batch_first else (1, 0)
        samples, num_queries, num_keys = self.query.shape[batch], self.query.shape[length], self.key.shape[length]
        keys, mask = self.masks
        fits = (
            [x.shape[2] for x in self.inputs] == [attention.embed_dim, attention.kdim, attention.vdim]
            and self.key.shape[:2] == self.value.shape[:2]
            and self.key.shape[batch] == samples
            and (keys is None or keys.shape == (samples, num_keys))
            and (mask is None or mask.shape == (num_queries, num_keys))
            and not (self.is_causal and mask is None)
            and all(m is None or m.dtype == torch.bool or m.is_floating_point() for m in self.masks)
        )
        return "" if fits else "its arguments do not fit to each other"


class AttentionUnit(TensorUnit):
    """Gathers the inputs of an ``nn.MultiheadAttention``, and scatters its output.

    Its operators are the projections of query, key and value, in one weight or in three, and that of the output.
    """

    def _replaced_modules(self) -> list[nn.Module]:
        return [self._attention]

    @property
    def _attention(self) -> Any:
        return self.operators[0].module

    def _install(self) -> None:
        attention = self._attention
        self._bias_layout: DimSliceLayout | None = None
        if attention.in_proj_bias is not None:
            self._bias_layout = DimSliceLayout.create(attention.in_proj_bias.shape, 0, self.groups.slices, 3)
        self._replace_forward(attention, self._attend)

    def _attend(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        call, attention = AttentionCall(*args, **kwargs), self._attention
        inputs = {id(x): x for x in call.inputs}
        rows, masks = [], []
        if is_possible := not call.refusal(attention):
            rows = [cast_for_autocast(x if attention.batch_first else x.transpose(0, 1)) for x in inputs.values()]
            masks = [mask for mask in call.masks if mask is not None]
        needed = sum(1 << index for index, x in enumerate((*rows, *masks)) if x.requires_grad)
        alike, first = self._describe(call) if is_possible else "", rows[0] if rows else None
        run, (counts,) = self.start([0 if first is None else len(first)], alike, needed, first)
        if not isinstance(run, SlicedRun):
            return self._attend_whole(run, own, call)
        gathered = {key: run.gather(x, index) for index, (key, x) in enumerate(zip(inputs, rows, strict=True))}
        queries, keys, values = self._project(run, *(gathered[id(x)] for x in call.inputs))
        mask = self._gather_masks(run, call, len(rows), counts, queries.dtype)
        heads, weights = self._attend_with(queries, keys, values, mask, call)
        y = functional.linear(heads.transpose(1, 2).flatten(2), run.weight_of(self.operators[-1]))
        return self._scatter(run, y, weights)

    def _describe(self, call: AttentionCall) -> str:
        """Return what has to be equal on all ranks."""
        attention, (query, key, value) = self._attention, call.inputs
        dtypes = [None if x is None else x.dtype for x in (*call.inputs, *call.masks)]
        length = 1 if attention.batch_first else 0
        return (
            f"{dtypes} {query is key} {key is value} {query is value} {query.shape[length]} {key.shape[length]} "
            f"{call.need_weights} {call.is_causal} {attention.dropout if attention.training else 0.0}"
        )

    def _attend_whole(
        self, run: OperatorRun, own: Callable[..., Any], call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Run the module's own code with whole weights in the place of its slices."""
        places: list[tuple[dict[str, Any], str]] = [(op.module._parameters, op.weight_name) for op in self.operators]
        try:
            for operator, (parameters, name) in zip(self.operators, places, strict=True):
                parameters[name] = run.weight_of(operator)
            result: tuple[Tensor, Tensor | None] = own(*call)
            return result
        finally:
            for operator, (parameters, name) in zip(self.operators, places, strict=True):
                parameters[name] = operator.weight

    def _project(self, run: SlicedRun, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return queries, keys and values (samples, heads, length, features of a head) of this rank's heads."""
        weights, attention = [run.weight_of(operator) for operator in self.operators[:-1]], self._attention
        bias, layout = attention.in_proj_bias, self._bias_layout
        bias = None if layout is None else layout.cut(bias, layout.shard_index, 0)
        if len(weights) == 1 and query is key is value:
            projected = functional.linear(query, weights[0], bias).chunk(3, -1)
        else:
            weights = list(weights[0].chunk(3)) if len(weights) == 1 else weights
            biases = (None, None, None) if bias is None else bias.chunk(3)
            parts = zip((query, key, value), weights, biases, strict=True)
            projected = tuple(functional.linear(*part) for part in parts)
        return [x.view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2) for x in projected]

    def _gather_masks(
        self, run: SlicedRun, call: AttentionCall, index: int, counts: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Return what is added to the scores (samples or 1, 1, queries or 1, keys); see Note [masks].

        Args:
            run: the run.
            call: its arguments.
            index: number of the first mask among what is gathered.
            counts: samples of each rank.
            dtype: type of the scores.
        """
        own_keys, own_mask = call.masks
        mask = None
        if own_keys is not None:
            mask = _as_numbers(run.gather(own_keys, index), dtype)[:, None, None]
            index += 1
        if own_mask is not None and not call.is_causal_alone:
            each = replace(run, counts=[1] * len(counts)).gather(own_mask[None], index)
            parts = zip(_as_numbers(each, dtype), counts, strict=True)
            by_sample = torch.cat([part.expand(count, *part.shape) for part, count in parts])[:, None]
            mask = by_sample if mask is None else mask + by_sample
        return mask

    def _attend_with(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of each head, and the part of this rank's heads in the averaged weights."""
        attention = self._attention
        dropout = attention.dropout if attention.training else 0.0
        index, degree = self.groups.slices.rank(), self.groups.degree
        if not call.need_weights:
            arguments = (queries, keys, values, mask, dropout, call.is_causal_alone)
            return drop_apart(functional.scaled_dot_product_attention, index, degree, *arguments), None
        scores = queries * attention.head_dim**-0.5 @ keys.transpose(2, 3)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = drop_apart(functional.dropout, index, degree, weights, dropout)
        return weights.to(values.dtype) @ values, weights.sum(1) / attention.num_heads

    def _scatter(self, run: SlicedRun, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output of this rank's samples, and their averaged weights if wanted."""
        out, attention, dtype = self.operators[-1], self._attention, y.dtype
        y = y if weights is None else torch.cat([y.to(weights.dtype), weights], 2)
        self._announce(Phase.OUTPUT)
        y = run.scatter(y)
        run.prefetch()
        y, own_weights = y[..., : out.out_features], y[..., out.out_features :]
        y = y.to(dtype) if out.bias is None else y.to(dtype) + out.bias.to(dtype)
        return y if attention.batch_first else y.transpose(0, 1), None if weights is None else own_weights


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores for a mask: minus infinity where a Boolean one is true."""
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
