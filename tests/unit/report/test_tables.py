"""The report shows the plan's numbers, with units, and joins repeated operators into runs."""

from __future__ import annotations

import os
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.run_correction import MeasuredStep
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, Link
from lightning_osdp.planning.spec.plan import ExecutionPlan, ModelIdentity, OperatorPlan, Prediction
from lightning_osdp.planning.spec.search_record import Baseline, BatchSizePoint, TriedPlan
from lightning_osdp.planning.whatif.simulate import SimulatedPoint, SimulatedResult
from lightning_osdp.report.explain import build_explanation, explain
from lightning_osdp.report.operator_runs import describe_tried, group_runs
from lightning_osdp.report.tables import (
    format_bytes,
    format_count,
    format_seconds,
    measured_table,
    plan_table,
    print_output,
    simulation_table,
    to_text,
)

DP, ZDP2, ZDP = Mode.DP, Mode.ZDP2, Mode.ZDP
FIT = CollectiveFit(latency_s=1e-4, s_per_byte=1e-9)


def operator(name: str, *slices: Mode, num_parameters: int = 1000, checkpoint: bool = False) -> OperatorPlan:
    split_dim = 1 if len(slices) > 1 else None
    return OperatorPlan(
        name=name, slices=slices, split_dim=split_dim, is_recomputed=checkpoint, num_parameters=num_parameters
    )


def gpt_operators() -> tuple[OperatorPlan, ...]:
    """Eight blocks: attention sharded in all of them, the MLP in the last three only."""
    operators = [operator("embed", DP, num_parameters=500_000)]
    for index in range(8):
        operators.append(operator(f"blocks.{index}.attn.qkv", ZDP, num_parameters=300_000))
        operators.append(operator(f"blocks.{index}.mlp", ZDP2 if index >= 5 else DP, num_parameters=800_000))
    return (*operators, operator("head", DP, num_parameters=500_000))


def make_plan(operators: tuple[OperatorPlan, ...] | None = None, **changes: object) -> ExecutionPlan:
    operators = gpt_operators() if operators is None else operators
    link = Link(all_reduce=FIT, all_gather=FIT, reduce_scatter=FIT)
    values: dict[str, object] = {
        "model": ModelIdentity(fingerprint="f", num_parameters=sum(op.num_parameters for op in operators)),
        "cluster": Cluster(nodes=2, devices_per_node=2, device="cpu", backend="gloo", link=link),
        "memory_limit_bytes": 2 << 30,
        "batch_size": 8,
        "accumulate_grad_batches": 3,
        "global_batch_size": 96,
        "operators": operators,
        "predicted": Prediction(
            step_time_s=1.25,
            compute_time_s=0.95,
            communication_time_s=0.3,
            samples_per_s=76.8,
            peak_memory_bytes=1536 << 20,
            overhead_bytes=420 << 20,
        ),
    }
    return ExecutionPlan.model_validate(values | changes)


def frontier(*points: tuple[int, float, int]) -> tuple[BatchSizePoint, ...]:
    return tuple(BatchSizePoint(batch_size=b, samples_per_s=s, peak_memory_bytes=m << 20) for b, s, m in points)


def cells(text: str, start: str) -> list[str]:
    """The cells of the one line that starts with ``start``: columns are at least two blanks apart."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return re.split(r"\s{2,}", line.strip())


def test_plan_table_summary_shows_every_number_with_its_unit() -> None:
    text = to_text(plan_table(make_plan(), profiling_s=12.5, collectives=34))
    assert text.startswith("Execution plan for 9.8 M parameters on 4 ranks (2 nodes of 2, cpu, gloo)")
    assert cells(text, "batch size") == ["batch size", "8 x 3 accumulated x 4 ranks = 96 in all"]
    assert cells(text, "step time") == ["step time", "1.25 s = 950.0 ms compute + 300.0 ms communication"]
    assert cells(text, "throughput") == ["throughput", "76.8 samples/s"]
    assert cells(text, "peak memory") == ["peak memory", "1.50 GiB of 2.00 GiB", "[###############.....] 75.0%"]
    assert "420.0 MiB of it before the model" in text
    assert cells(text, "collectives") == ["collectives", "34 per step"]
    assert cells(text, "profiling") == ["profiling", "took 12.50 s"]


def test_plan_table_says_what_is_replicated_because_it_is_compiled() -> None:
    reasons = ["compiled by torch.compile"] * 2 + ["used by the whole model"]
    compiled = [
        operator(f"layer.{i}", Mode.DP).model_copy(update={"replicated_reason": reason})
        for i, reason in enumerate(reasons)
    ]
    text = to_text(plan_table(make_plan((*compiled, operator("other", Mode.ZDP)))))
    assert "Replicated as they are compiled by torch.compile: layer.0 and 1 more" in text.splitlines()
    assert "Replicated as" not in to_text(plan_table(make_plan()))


def test_plan_table_omits_unknown_values() -> None:
    text = to_text(plan_table(make_plan()))
    assert "collectives" not in text
    assert "profiling" not in text
    assert "runner-up" not in text


def test_plan_table_shows_blocks_with_mode_count_and_parameters() -> None:
    text = to_text(plan_table(make_plan()))
    table = text.split("\n\n")[2].splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in table[1:]] == [
        ["embed, head", "dp", "2", "1.0 M"],
        ["blocks.0-4", "mixed", "10", "5.5 M"],
        ["attn.qkv", "zdp", "5", "1.5 M"],
        ["mlp", "dp", "5", "4.0 M"],
        ["blocks.5-7", "mixed", "6", "3.3 M"],
        ["attn.qkv", "zdp", "3", "900.0 K"],
        ["mlp", "zdp2", "3", "2.4 M"],
    ]


def test_plan_table_shows_operator_names_literally() -> None:
    text = to_text(plan_table(make_plan((operator("a[bold].0", DP), operator("", DP)))))
    assert cells(text, "a[bold].0") == ["a[bold].0", "dp", "1", "1.0 K"]
    assert cells(text, "(the module itself)") == ["(the module itself)", "dp", "1", "1.0 K"]


def test_plan_table_shows_parameters_and_share_per_mode() -> None:
    text = to_text(plan_table(make_plan()))
    assert cells(text, "dp ") == ["dp", "replicated", "5.0 M", "51.0%"]
    assert cells(text, "zdp2 ") == ["zdp2", "sharded, gathered once a step", "2.4 M", "24.5%"]
    assert cells(text, "zdp ") == ["zdp", "sharded, gathered twice a step", "2.4 M", "24.5%"]


def test_plan_table_counts_slices_for_their_mode() -> None:
    split = operator("mlp", DP, ZDP, ZDP, ZDP, num_parameters=4002, checkpoint=True)
    text = to_text(plan_table(make_plan((split,))))
    assert cells(text, "mlp") == ["mlp", "dp x 1 + zdp x 3, recomputed", "1", "4.0 K"]
    assert cells(text, "dp ") == ["dp", "replicated", "1.0 K", "25.0%"]
    assert cells(text, "zdp ") == ["zdp", "sharded, gathered twice a step", "3.0 K", "75.0%"]


def test_plan_table_runners_up_are_three_fastest_other_batch_sizes() -> None:
    points = frontier((1, 20.0, 900), (2, 40.0, 1000), (4, 73.728, 1200), (8, 76.8, 1536), (16, 60.0, 2047))
    text = to_text(plan_table(make_plan(frontier=points)))
    assert [line.split("  ")[0] for line in text.splitlines() if line.startswith("batch size ")][1:] == [
        "batch size 4",
        "batch size 16",
        "batch size 2",
    ]
    assert cells(text, "batch size 4") == ["batch size 4", "73.7 samples/s", "-4.0%", "1.17 GiB"]


@pytest.mark.parametrize(("rate", "is_said"), [(76.8, False), (77.2, True), (90.0, False)])
def test_plan_table_says_why_a_slightly_faster_batch_size_is_not_taken(rate: float, is_said: bool) -> None:
    text = to_text(plan_table(make_plan(frontier=frontier((8, 76.8, 1536), (16, rate, 1600)))))
    assert ("Of batch sizes within 1% of the fastest the smallest is taken." in text) == is_said


def test_measured_table_shows_prediction_measurement_and_error() -> None:
    text = to_text(measured_table(make_plan(), MeasuredStep(1.0, 0.2, 2048 << 20), 20))
    assert cells(text, "step time") == ["step time", "1.25 s", "1.00 s", "+25.0%"]
    assert cells(text, "throughput") == ["throughput", "76.8 samples/s", "96.0 samples/s", "-20.0%"]
    assert cells(text, "peak memory") == ["peak memory", "1.50 GiB", "2.00 GiB", "-25.0%"]


def test_plan_table_text_has_no_colours_and_fits_width() -> None:
    deep = tuple(operator(f"model.decoder.layers.{i}.self_attention.{'x' * 90}", ZDP) for i in range(2))
    text = to_text(plan_table(make_plan(deep, frontier=frontier((1, 1.0, 1))), profiling_s=1.0, collectives=1))
    assert text.isascii()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], ["a.0-2.b"]),
        (["a.0.q", "a.0.k", "a.1.q", "a.1.k"], ["a.0-1.q", "a.0-1.k"]),
        (["a.0", "a.2"], ["a.0", "a.2"]),
        (["a.9", "a.10"], ["a.9-10"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.0.b.0-1", "a.1.b.0-1"]),
        (["a.0.b.3", "a.1.b.3"], ["a.0-1.b.3"]),
        (["a.0.b", "c.1.b"], ["a.0.b", "c.1.b"]),
        (["conv1", "conv2"], ["conv1", "conv2"]),
        (["", "head"], ["", "head"]),
    ],
)
def test_group_runs_merges_names_that_differ_in_one_integer(names: list[str], patterns: list[str]) -> None:
    assert [run.pattern for run in group_runs(operator(name, DP) for name in names)] == patterns


def test_group_runs_starts_new_run_at_other_choice() -> None:
    operators = [
        operator("a.0", DP),
        operator("a.1", DP),
        operator("a.2", ZDP),
        operator("a.3", ZDP, ZDP),
        operator("a.4", ZDP, ZDP, checkpoint=True),
        operator("a.5", DP),
    ]
    assert [run.pattern for run in group_runs(operators)] == ["a.0-1", "a.2", "a.3", "a.4", "a.5"]


names_of_repeated_layers = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("qk")), unique=True, max_size=30
)


@given(names_of_repeated_layers, st.data())
def test_group_runs_contains_every_operator_once(triples: list[tuple[int, int, str]], data: st.DataObject) -> None:
    operators = [operator(f"a.{i}.b.{j}.{k}", data.draw(st.sampled_from([DP, ZDP]))) for i, j, k in triples]
    runs = group_runs(operators)
    assert sorted(op.name for run in runs for op in run.operators) == sorted(op.name for op in operators)
    assert all(len({op.slices for op in run.operators}) == 1 for run in runs)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (900 << 20, "900.0 MiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (8 << 30, "8.00 GiB"),
        (2048 << 30, "2048.00 GiB"),
    ],
)
def test_format_bytes(amount: int, text: str) -> None:
    assert format_bytes(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.000 ms"),
        (4.5e-5, "0.045 ms"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (1.25, "1.25 s"),
        (59.999, "1 min 00 s"),
        (125.2, "2 min 05 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(768, "768"), (98_304, "98.3 K"), (999_999, "1.0 M"), (1_500_000_000, "1.50 B")]
)
def test_format_count(count: int, text: str) -> None:
    assert format_count(count) == text


def test_simulation_table_shows_what_fits_and_what_the_rest_needs() -> None:
    fits = SimulatedResult(
        batch_size=3,
        global_batch_size=24,
        samples_per_s=12.34,
        step_time_s=2.0,
        peak_memory_bytes=3 << 30,
        sharded_share=0.755,
    )
    common = {"memory_limit_bytes": 4 << 30, "plan": None, "dp": None}
    points = [
        SimulatedPoint(devices=1, nodes=1, osdp=None, zdp=None, needed_bytes=5 << 30, **common),
        SimulatedPoint(devices=16, nodes=2, osdp=fits, zdp=fits, **common),
    ]
    lines = to_text(simulation_table(points), width=80).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "osdp", "does", "not", "fit", "needs", "5.00", "GiB"],
        ["dp", "does", "not", "fit"],
        ["zdp", "does", "not", "fit"],
        ["16", "(2", "nodes)", "osdp", "3", "12.3", "3.00", "GiB", "76%"],
        ["dp", "does", "not", "fit"],
        ["zdp", "3", "12.3", "3.00", "GiB", "76%"],
    ]


def tried(name: str, batch_size: int, step_ms: float, is_chosen: bool = False) -> TriedPlan:
    return TriedPlan(
        name=name,
        batch_size=batch_size,
        step_time_s=step_ms / 1e3,
        samples_per_s=batch_size / step_ms,
        spread_s=0.001,
        num_rounds=3,
        is_chosen=is_chosen,
    )


def test_plan_table_and_explanation_say_what_tried_plans_took() -> None:
    plan = make_plan()
    size = plan.batch_size
    plan = plan.model_copy(
        update={
            "tried": (
                tried("sharded per operator", size, 241, is_chosen=True),
                tried("all replicated", size, 258),
                tried("sharded per block", 2 * size, 500),
            )
        }
    )
    expected = f"all replicated 258.0 ms, sharded per block 500.0 ms at batch size {2 * size}, this plan 241.0 ms"
    assert expected in " ".join(to_text(plan_table(plan)).split())
    assert f"Tried in turns (3 rounds): a step took {expected}." in explain(plan)
    assert "tried" not in to_text(plan_table(make_plan()))
    assert "Tried in turns" not in explain(make_plan())


def test_describe_tried_says_where_this_plan_is_all_replicated() -> None:
    plan = make_plan()
    replicated = tuple(op.model_copy(update={"slices": (Mode.DP,), "split_dim": None}) for op in plan.operators)
    both = (tried("sharded per operator", plan.batch_size, 300), tried("all replicated", plan.batch_size, 258, True))
    plan = plan.model_copy(update={"operators": replicated, "tried": both})
    assert describe_tried(plan) == "sharded per operator 300.0 ms, this plan (all replicated) 258.0 ms"


def baseline(name: str, samples_per_s: float = 0.0, missing_mib: int = 0, **marks: bool) -> Baseline:
    return Baseline(
        name=name,
        fits=not missing_mib,
        batch_size=4,
        samples_per_s=samples_per_s,
        peak_memory_bytes=1 << 30,
        missing_bytes=missing_mib << 20,
        **marks,
    )


MISSING = baseline("DDP", missing_mib=73)
SLOWER = baseline("FSDP per operator, recomputed", 64.0)
TRIED = baseline("ZeRO-2", 70.0, is_tried=True)
UNCERTAIN = baseline("FSDP per block", 76.8, is_uncertain=True)
FASTER = baseline("FSDP per block", 96.0)
OWN = baseline("DDP", 76.8, is_plan=True, is_tried=True)


def with_baselines(*baselines: Baseline) -> ExecutionPlan:
    return make_plan(baselines=baselines)


def test_plan_table_shows_what_else_there_was_and_the_gain_over_it() -> None:
    text = to_text(plan_table(with_baselines(MISSING, SLOWER, TRIED, UNCERTAIN, FASTER)))
    assert cells(text, "DDP") == ["DDP", "does not fit", "needs 73.0 MiB more"]
    assert cells(text, "FSDP per operator") == ["FSDP per operator, recomputed", "4", "64.0", "+20.0%"]
    assert cells(text, "ZeRO-2") == ["ZeRO-2", "4", "70.0", "+9.7%, tried"]
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines() if line.startswith("FSDP per block")]
    assert lines == [["FSDP per block", "4", "not tried", "none sure"], ["FSDP per block", "4", "96.0", "-20.0%"]]
    assert max(map(len, text.splitlines())) <= 80
    assert cells(to_text(plan_table(with_baselines(OWN))), "DDP")[-1] == "this plan"
    assert "else" not in to_text(plan_table(make_plan()))


def test_explanation_says_what_else_there_was_in_sentences() -> None:
    plan = with_baselines(MISSING, SLOWER, TRIED, UNCERTAIN, FASTER, OWN)
    assert list(build_explanation(plan).baselines) == [
        "instead, DDP: does not fit, 73.0 MiB are missing at the smallest batch size.",
        "instead, FSDP per operator, recomputed at batch size 4: 64.0 samples/s by prediction, "
        "this plan is 20.0% faster.",
        "instead, ZeRO-2 at batch size 4: 70.0 samples/s when tried, this plan is 9.7% faster.",
        "instead, FSDP per block at batch size 4: is predicted to be no slower, but was not tried as this plan was.",
        "instead, FSDP per block at batch size 4: 96.0 samples/s by prediction, this plan is 20.0% slower.",
        "instead, DDP: that is what this plan does.",
    ]
    assert all(line in explain(plan).splitlines() for line in build_explanation(plan).baselines)
    assert "instead" not in explain(make_plan())


@pytest.mark.parametrize(
    ("baselines", "step_s", "text"),
    [
        ((MISSING, SLOWER, TRIED), 1.25, "Gained: 9.7% over ZeRO-2, the best of what else there was (70.0 samples"),
        ((MISSING, SLOWER, TRIED), 1.25, "DDP does not fit: 73.0 MiB are missing."),
        ((SLOWER,), 1.2, "Gained: 25.0% over FSDP per operator, recomputed, the best of what else there was (64.0"),
        ((MISSING,), 1.25, "Gained: the training itself. Nothing else fits: DDP needs least, and 73.0 MiB more"),
        ((TRIED,), 1.375, "Nothing gained over ZeRO-2, the best of what else there was (70.0 samples/s when tried"),
        ((TRIED,), 2.5, "Gained: 9.7% over ZeRO-2, the best of what else there was (70.0 samples/s when tried"),
        ((TRIED,), 2.5, "The machine was slower than when this was compared."),
        ((TRIED,), 0.5, "Gained: 9.7% over ZeRO-2, the best of what else there was (70.0 samples/s when tried"),
        ((TRIED,), 0.5, "The machine was faster than when this was compared."),
        ((FASTER,), 1.25, "Nothing gained over FSDP per block, the best of what else there was (96.0 samples/s by"),
        ((TRIED, UNCERTAIN), 1.25, "No gain is sure over FSDP per block: it is predicted to be no slower, but was not"),
        ((OWN, TRIED), 1.25, "This plan is DDP: the fastest of what there was."),
    ],
)
def test_measured_table_says_what_was_gained(baselines: tuple[Baseline, ...], step_s: float, text: str) -> None:
    shown = to_text(measured_table(with_baselines(*baselines), MeasuredStep(step_s, None, 1 << 30), 20))
    assert text in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(32, "Broken pipe")], ids=str)
def test_print_output_that_is_refused_is_a_warning(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise error

        def flush(self) -> None:
            pass

        def isatty(self) -> bool:
            return False

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)  # rich puts the null device in its place

    monkeypatch.setattr(sys, "stdout", Refusing())
    with pytest.warns(OSDPWarning, match=f"standard output takes no text: .*{error.strerror}"):
        print_output("a table")
