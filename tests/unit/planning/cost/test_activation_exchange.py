"""Time and memory of tensor parallel operators, worked out by hand."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.cost.activation_exchange import exchanged_bytes, handled_bytes
from lightning_osdp.planning.cost.footprint import Footprint, footprint
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.cost.shards import num_sharded_elements
from lightning_osdp.planning.cost.step_time import (
    RECOMPUTE_OVERHEAD,
    communication_time,
    engine_time,
    exchange_time,
    forward_backward_time,
    overlapped_time,
    time_cost,
)
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.cluster import (
    CalibrationFactors,
    Cluster,
    CollectiveFit,
    EngineOverhead,
    HierarchicalLinks,
    Link,
    ModeOverhead,
    OperatorTime,
    ShardingLink,
    TensorTime,
)
from lightning_osdp.planning.spec.model import LinearInBatch, Moment, NonTrainingWork, Operator, ParameterInfo
from lightning_osdp.planning.spec.tensor import TensorCandidate, TensorRole
from tests.support.small_models import MIB, blocks_of_two, compute, mib
from tests.support.tensor_problems import mlp

GATHER, SCATTER, SWAP, REDUCE = 1e-3, 2e-3, 4e-3, 8e-3
"""Seconds per MiB of the collectives."""


def fit(s_per_mib: float, latency_s: float = 0.0) -> CollectiveFit:
    return CollectiveFit(latency_s=latency_s, s_per_byte=s_per_mib / MIB)


def cluster(latency_s: float = 0.0, **changes: object) -> Cluster:
    link = Link(
        all_reduce=fit(REDUCE),
        all_gather=fit(GATHER, latency_s),
        reduce_scatter=fit(SCATTER, latency_s),
        all_to_all=fit(SWAP, latency_s),
    )
    values = {"devices_per_node": 4, "device": "cpu", "backend": "gloo", "link": link} | changes
    return Cluster(**values)


def operators(roles: tuple[TensorRole, ...], input_mib: float = 1.0, output_mib: float = 3.0) -> list[Operator]:
    """Operators with 8 MiB of weight, a bias of 1 KiB and twice that in states, in one candidate."""
    names = [f"mlp.{index}" for index in range(len(roles))]
    candidate = TensorCandidate(
        operators=tuple(names),
        roles=roles,
        scope="mlp" if len(roles) > 1 else None,
        degrees=(2, 4),
        input_bytes=input_mib * MIB,
        output_bytes=output_mib * MIB,
    )
    return [
        Operator(
            name=name,
            kind="Linear",
            parameters=(
                ParameterInfo(name=f"{name}.weight", shape=(2048, 1024), optimizer_bytes=16 * MIB),
                ParameterInfo(name=f"{name}.bias", shape=(256,), optimizer_bytes=2048),
            ),
            tensor=candidate.use(index),
        )
        for index, name in enumerate(names)
    ]


def cut(degree: int) -> ShardingChoice:
    return ShardingChoice((Mode.TP,), tensor_degree=degree)


PAIR = (TensorRole.COLUMN, TensorRole.ROW)
GATED = (TensorRole.COLUMN, TensorRole.COLUMN, TensorRole.ROW)


@pytest.mark.parametrize(
    ("roles", "degree", "forward_s", "backward_s"),
    [
        # (t - 1) s_per_byte P / t; gathers and scatters of P = t x, exchanges of P = x
        ((TensorRole.LINEAR,), 2, GATHER * 1 + SWAP * 1.5, SWAP * 1.5 + SCATTER * 1),
        ((TensorRole.LINEAR,), 4, GATHER * 3 + SWAP * 2.25, SWAP * 2.25 + SCATTER * 3),
        ((TensorRole.EMBEDDING,), 2, GATHER * 1 + SWAP * 1.5, SWAP * 1.5),
        ((TensorRole.TABLE_ROWS,), 2, GATHER * 1 + SCATTER * 3, GATHER * 3),
        ((TensorRole.ATTENTION,), 2, GATHER * 1 + SCATTER * 3, GATHER * 3 + SCATTER * 1),
        (PAIR, 2, GATHER * 1 + SCATTER * 3, GATHER * 3 + SCATTER * 1),
        (GATED, 4, GATHER * 3 + SCATTER * 9, GATHER * 9 + SCATTER * 3),
    ],
)
def test_exchange_time_is_that_of_its_collectives_and_recomputing_repeats_the_forward(
    roles: tuple[TensorRole, ...], degree: int, forward_s: float, backward_s: float
) -> None:
    own = [exchange_time(operator, cut(degree), cluster()).value_at(5) for operator in operators(roles)]
    again = [exchange_time(op, cut(degree), cluster(), recomputed=True).value_at(5) for op in operators(roles)]
    assert sum(own) == pytest.approx(5 * (forward_s + backward_s))
    assert sum(again) == pytest.approx(5 * (2 * forward_s + backward_s))


def test_exchange_time_counts_the_latency_of_shared_collectives_once() -> None:
    times = [exchange_time(operator, cut(2), cluster(latency_s=1.0)) for operator in operators(GATED)]
    assert sum(time.fixed_s for time in times) == pytest.approx(5.0)  # the first tells the numbers of rows
    assert exchange_time(operators(PAIR)[0], ShardingChoice((Mode.ZDP,)), cluster(latency_s=1.0)) == (0.0, 0.0)


def test_each_run_of_an_operator_that_runs_twice_has_latencies_and_all_inputs_are_held() -> None:
    (once,), slow = operators((TensorRole.LINEAR,)), cluster(latency_s=1.0)
    slow = slow.model_copy(update={"engine": EngineOverhead(tp=ModeOverhead(fixed_s=3.0))})
    twice = once.model_copy(update={"calls": 2})
    time, expected = exchange_time(twice, cut(2), slow), exchange_time(once, cut(2), slow)
    assert (time.fixed_s, time.per_sample_s) == (2 * expected.fixed_s, expected.per_sample_s)
    assert engine_time(twice, cut(2), slow).per_microbatch_s == pytest.approx(2 * 3.0)
    own = footprint(twice, cut(4), cluster())
    held = (own.gathered_per_sample, own.forward_per_sample, own.backward_per_sample)
    assert held == (3 * MIB, 1.5 * MIB, 2 * MIB)


def test_exchange_time_inside_nodes_takes_their_links() -> None:
    flat, inside = cluster(), ShardingLink(all_gather=fit(0.25), reduce_scatter=fit(0.5))
    links = HierarchicalLinks(intra_node=inside, inter_node=fit(2.0), hierarchical=inside)
    nodes = cluster(devices_per_node=2, nodes=2, hierarchical_links=links)
    (linear,) = operators((TensorRole.LINEAR,))
    assert exchange_time(linear, cut(2), nodes).value_at(1) == pytest.approx(0.25 * 1 + 2 * 0.25 * 1.5 + 0.5 * 1)
    # the gradient's slice of 4 MiB is averaged between the two nodes
    assert communication_time(linear, cut(2), nodes).per_step_s == pytest.approx(2.0 * 4 / 2, rel=1e-2)
    assert communication_time(linear, cut(2), flat).per_step_s == pytest.approx(REDUCE * 4 / 2, rel=1e-2)


def test_gradients_of_slices_are_averaged_over_ranks_with_the_same_slice_and_not_hidden() -> None:
    (linear,) = operators((TensorRole.LINEAR,))
    weight = linear.model_copy(update={"parameters": linear.parameters[:1]})
    assert communication_time(weight, cut(4), cluster()) == (0.0, 0.0)
    assert communication_time(weight, cut(2), cluster()) == (pytest.approx(REDUCE * 4 / 2), 0.0)
    hidden = fit(REDUCE).model_copy(update={"overlap_fraction": 1.0})
    overlapping = cluster().link.model_copy(update={"all_reduce": hidden})
    assert overlapped_time(weight, cut(2), cluster(link=overlapping)) == (0.0,) * 7
    assert engine_time(weight, cut(2), cluster()) == (0.0, 0.0)


@pytest.mark.parametrize("roles", [(TensorRole.LINEAR,), PAIR, GATED])
def test_engine_takes_as_long_for_operators_that_run_together_as_for_one_and_by_the_bytes_of_collectives(
    roles: tuple[TensorRole, ...],
) -> None:
    own = cluster(engine=EngineOverhead(tp=ModeOverhead(fixed_s=3.0, s_per_byte=0.5 / MIB)))
    together, use = operators(roles), [op.tensor for op in operators(roles) if op.tensor is not None]
    assert sum(engine_time(op, cut(4), own).per_microbatch_s for op in together) == pytest.approx(3.0)
    again = sum(engine_time(op, cut(4), own, recomputed=True).per_microbatch_s for op in together)
    assert again == pytest.approx(3.0 * RECOMPUTE_OVERHEAD)
    added = sum(
        exchange_time(op, cut(4), own).value_at(5) - exchange_time(op, cut(4), cluster()).value_at(5) for op in together
    )
    handled = 2 * 4 * (1 + 3) if len(roles) > 1 else 2 * (4 * 1 + 3)
    assert sum(handled_bytes(each, 4) for each in use) == pytest.approx(handled * MIB)
    assert added == pytest.approx(5 * 0.5 * handled)


def test_slice_takes_its_part_of_what_does_not_depend_on_the_batch_unless_measured() -> None:
    line = LinearInBatch(fixed=8e-3, per_sample=1e-3)
    time = OperatorTime(forward=line, backward=line.scale(2))
    forward, backward = forward_backward_time(time, cut(4))
    assert (forward.value_at(3), backward.value_at(3)) == (pytest.approx(5e-3), pytest.approx(10e-3))
    known = TensorTime(degree=4, forward=line, backward=line)
    assert forward_backward_time(time.model_copy(update={"tensor": (known,)}), cut(4)) == (line, line)


def test_time_cost_has_exchanges_scaled_by_calibration_and_update_of_the_slice() -> None:
    (linear,) = operators((TensorRole.LINEAR,))
    engine = EngineOverhead(calibration=CalibrationFactors(tp=0.5))
    model = blocks_of_two(1)
    times = compute(model).model_copy(update={"optimizer_s_per_byte": 1.0 / MIB})
    cost = time_cost(linear, cut(4), cluster(engine=engine), times, OperatorTime(), 2)
    exchanged_s = 2 * (GATHER * 3 + SWAP * 4.5 + SCATTER * 3)
    bias_s = communication_time(linear, cut(4), cluster()).per_step_s
    assert cost.communication_s == pytest.approx(1.5 * (exchanged_s + bias_s))
    assert cost.compute_s == pytest.approx(2.0, rel=1e-3)


def footprint_of(role: TensorRole, degree: int = 4) -> Footprint[float]:
    roles = PAIR if role.has_scope else (role,)
    operator = next(op for op in operators(roles) if op.tensor is not None and op.tensor.role == role)
    return footprint(operator, cut(degree), cluster())


def test_footprint_has_slices_of_states_and_gradients_and_no_whole_weight() -> None:
    own = footprint_of(TensorRole.COLUMN)
    bias = 1024
    assert own.states == 2 * MIB + 4 * MIB + 3 * bias
    assert own.replicated_gradients == 2 * MIB + bias
    assert own.sharded_gradients == own.unsharded_between_passes == own.unsharded_while_running == own.transient == 0
    assert own.bucketed == bias
    assert own.local_trainable == 2 * MIB + bias
    assert own.largest_local_trainable == 2 * MIB
    assert (own.checkpoint_tensor, own.unsharded_state) == (8 * MIB, 24 * MIB)
    (linear,) = operators((TensorRole.LINEAR,))
    assert num_sharded_elements(linear, cut(4)) == pytest.approx(2048 * 1024)


@pytest.mark.parametrize(
    ("role", "between", "forward", "backward"),
    [
        (TensorRole.EMBEDDING, 3, 3, 3),
        (TensorRole.LINEAR, 3, 3, 4),
        (TensorRole.COLUMN, 3, 0, 4),
        (TensorRole.ROW, 0, 12, 12),
        (TensorRole.TABLE_ROWS, 3, 12, 12),
        (TensorRole.ATTENTION, 3, 12, 12),
    ],
)
def test_footprint_has_what_is_gathered_from_other_ranks_per_sample(
    role: TensorRole, between: float, forward: float, backward: float
) -> None:
    own = footprint_of(role)
    found = (own.gathered_per_sample, own.forward_per_sample, own.backward_per_sample)
    assert found == (between * MIB, forward * MIB, backward * MIB)


def test_timeline_holds_gathered_inputs_from_forward_to_backward_and_not_while_their_block_is_away() -> None:
    model = blocks_of_two(2).with_tensor_candidates([mlp("blocks.0", input_mib=1, output_mib=0)])
    timeline = Timeline(model, cluster(), 0)
    plain, exchanged = [ShardingChoice()] * 4, [cut(4), cut(4), *[ShardingChoice()] * 2]
    added = (timeline.curves(exchanged, 2)["activations"] - timeline.curves(plain, 2)["activations"]) / MIB
    # up 0, down 0, up 1, down 1, then backward: the input of the first is held until its own backward has ended
    assert added.tolist() == [6, 6, 6, 6, 6, 6, 6, 6, 0]
    recomputed = timeline.curves(exchanged, 2, recomputed=("blocks.0",))["activations"]
    base = timeline.curves(plain, 2, recomputed=("blocks.0",))["activations"]
    assert ((recomputed - base) / MIB).tolist() == [6, 0, 0, 0, 0, 0, 6, 6, 6, 6, 0]
    assert timeline.phases(("blocks.0",))[6:8] == ["recompute", "recompute"]


@pytest.mark.parametrize(("batch_size", "live_mib"), [(3, 3), (0, 0)])
def test_evaluation_counts_weights_of_operators_that_are_gathered_together(batch_size: int, live_mib: int) -> None:
    evaluation = (Moment(phase="forward", operator=0, live=mib(1)), Moment(phase="forward", operator=1, live=mib(1)))
    model = blocks_of_two(1).model_copy(update={"evaluation": evaluation})
    model = model.with_tensor_candidates([mlp("blocks.0", input_mib=1, output_mib=2)])
    timeline = Timeline(model, cluster(), 0, NonTrainingWork(evaluation_batch_size=batch_size))
    states = sum(footprint(operator, cut(4), cluster()).states for operator in model.operators)
    weights = sum(parameter.parameter_bytes for operator in model.operators for parameter in operator.parameters)
    assert timeline.peak([cut(4)] * 2, 1).evaluation_bytes == states + live_mib * MIB + weights


def test_exchanged_bytes_are_what_a_rank_receives() -> None:
    (linear,) = operators((TensorRole.LINEAR,))
    assert linear.tensor is not None
    assert exchanged_bytes(linear.tensor, 4) == pytest.approx((3 + 2.25 + 2.25 + 3) * MIB)
    pair = [operator.tensor for operator in operators(PAIR) if operator.tensor is not None]
    assert sum(exchanged_bytes(use, 2) for use in pair) == pytest.approx((1 + 3 + 3 + 1) * MIB)
