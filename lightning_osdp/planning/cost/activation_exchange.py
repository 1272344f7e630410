"""What an operator exchanges and holds besides its slices while it is tensor parallel, in seconds and bytes per sample.

With t ranks in a group, and x bytes of input and y bytes of output for the samples of one rank:

    embedding  gather the indices, t x; exchange the values that each rank has looked up, y; in backward their gradient
    table rows gather the indices, t x; reduce and scatter the values, t y; in backward gather their gradient
    linear     gather the input, t x; exchange the output, y; in backward the same the other way round
    column     gather the input, t x; in backward reduce and scatter its gradient
    row        reduce and scatter the output, t y; in backward gather its gradient
    attention  gather the inputs, t x; reduce and scatter the output, t y; in backward the same the other way round

Before, the ranks tell each other in a small gather how many rows they have. A recomputed block repeats what its forward
exchanges. The gathered input stays for the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, Link, ShardingLink
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.tensor import TensorRole, TensorUse


class _ExchangeStep(NamedTuple):
    """One collective of a role, and what it moves."""

    collective: str
    moves_input: bool


_GATHER, _SCATTER_GRADIENT = _ExchangeStep("all_gather", True), _ExchangeStep("reduce_scatter", True)
_SWAP, _SCATTER, _GATHER_GRADIENT = (
    _ExchangeStep(name, False) for name in ("all_to_all", "reduce_scatter", "all_gather")
)
_FORWARD = {
    TensorRole.EMBEDDING: (_GATHER, _SWAP),
    TensorRole.TABLE_ROWS: (_GATHER, _SCATTER),
    TensorRole.LINEAR: (_GATHER, _SWAP),
    TensorRole.COLUMN: (_GATHER,),
    TensorRole.ROW: (_SCATTER,),
    TensorRole.ATTENTION: (_GATHER, _SCATTER),
}
_BACKWARD = {
    TensorRole.EMBEDDING: (_SWAP,),
    TensorRole.TABLE_ROWS: (_GATHER_GRADIENT,),
    TensorRole.LINEAR: (_SWAP, _SCATTER_GRADIENT),
    TensorRole.COLUMN: (_SCATTER_GRADIENT,),
    TensorRole.ROW: (_GATHER_GRADIENT,),
    TensorRole.ATTENTION: (_GATHER_GRADIENT, _SCATTER_GRADIENT),
}


class ExchangeTime(NamedTuple):
    """Seconds of the exchanges of one micro-batch."""

    fixed_s: float
    per_sample_s: float

    def value_at(self, batch_size: int) -> float:
        """Return the seconds at ``batch_size`` samples on each rank."""
        return self.fixed_s + batch_size * self.per_sample_s


class ActivationBytes(NamedTuple):
    """Bytes per sample that a slice adds to the traced operator's activations."""

    between_passes: float
    """Bytes of gathered inputs, from its forward to its backward."""
    forward: float
    """Further bytes while it runs forward."""
    backward: float
    """Further bytes while it runs backward."""


NO_ACTIVATIONS = ActivationBytes(0.0, 0.0, 0.0)


def exchange_s(operator: Operator, degree: int, cluster: Cluster, *, recomputed: bool) -> ExchangeTime:
    """Return the seconds of all exchanges of ``operator``, in each of its calls; nothing hides them."""
    use = operator.tensor
    if use is None:
        return ExchangeTime(0.0, 0.0)
    forwards, links = 2 if recomputed else 1, _group_links(cluster)
    exchanges = [*_BACKWARD[use.role], *forwards * _FORWARD[use.role]]
    exchanged = _sum_times(exchanges, use, degree, links, cluster.engine.tp.s_per_byte)
    start_s = forwards * links.all_gather.time_s(0, degree) / use.num_operators
    return exchanged._replace(fixed_s=operator.calls * (exchanged.fixed_s + start_s))


def _group_links(cluster: Cluster) -> Link | ShardingLink:
    """Return the collectives of a group, which lies inside a node."""
    links = cluster.hierarchical_links
    return links.intra_node if cluster.is_hierarchical and links is not None else cluster.link


def _sum_times(
    exchanges: Iterable[_ExchangeStep], use: TensorUse, degree: int, links: Link | ShardingLink, engine_s: float
) -> ExchangeTime:
    """Return the seconds of collectives, and the engine's own of each byte."""
    fixed_s = per_sample_s = 0.0
    for exchange in exchanges:
        fit: CollectiveFit = getattr(links, exchange.collective)
        whole, latency_s = _whole_bytes(exchange, use, degree), fit.time_s(0, degree)
        fixed_s += use.share * latency_s
        per_sample_s += fit.time_s(whole, degree) - latency_s + engine_s * whole
    return ExchangeTime(fixed_s, per_sample_s)


def _whole_bytes(exchange: _ExchangeStep, use: TensorUse, degree: int) -> float:
    """Return the bytes per sample that a collective makes, or takes, on each rank."""
    moved = use.input_bytes if exchange.moves_input else use.output_bytes
    return moved if exchange == _SWAP else degree * moved


def handled_bytes(use: TensorUse, degree: int) -> float:
    """Return the bytes per sample of all collectives of a forward and a backward, which the engine handles."""
    return sum(_whole_bytes(exchange, use, degree) for exchange in (*_FORWARD[use.role], *_BACKWARD[use.role]))


def exchanged_bytes(use: TensorUse, degree: int) -> float:
    """Return the bytes per sample that a rank receives for one operator in forward and backward."""
    moved = 0.0
    for exchange in (*_FORWARD[use.role], *_BACKWARD[use.role]):
        own = use.input_bytes if exchange.moves_input else use.output_bytes
        moved += own * (degree - 1) / (degree if exchange == _SWAP else 1)
    return moved


def activation_bytes(operator: Operator, degree: int) -> ActivationBytes:
    """Return what the operator holds for the samples of its group, beyond what was traced for those of one rank."""
    use = operator.tensor
    if use is None or degree == 1:
        return NO_ACTIVATIONS
    between_passes = (degree - 1) * use.input_bytes  # of all calls; the rest is of the one that runs
    inputs, outputs = use.input_bytes / operator.calls, use.output_bytes / operator.calls
    if use.role in (TensorRole.ROW, TensorRole.TABLE_ROWS):  # its partial output, and the gathered gradient of that
        between_passes = 0.0 if use.role == TensorRole.ROW else between_passes
        return ActivationBytes(between_passes, degree * outputs, degree * outputs)
    if use.role == TensorRole.ATTENTION:  # the same, and then the partial gradient of its inputs
        return ActivationBytes(between_passes, degree * outputs, degree * max(inputs, outputs))
    # The partial gradient of a shared input is whole for each operator that reads it.
    partial = 0.0 if use.role == TensorRole.EMBEDDING else degree * inputs / use.share
    swapped = outputs if use.role != TensorRole.COLUMN else 0.0
    return ActivationBytes(between_passes, swapped, max(partial, swapped))
