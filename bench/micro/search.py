"""How fast the search is, against a MILP solver and a textbook dynamic programme, on the same instances.

    python -m bench search [--quick] [--sweep]

``--sweep`` plans a GPT-3 (96 layers, hidden size 12288, sequences of 2048) for 64 H100s in 8 nodes instead: all batch
sizes from 1 to 128, with splitting and recomputation, and says how long that takes from the model to the plan.

Menus of 12 options follow the paper's equation 2: modes dp, zdp2 and zdp, each operator cut into 1, 2, 4 or 8 slices
that take one mode. "Identical" is a GPT: four operators, repeated in each layer. "Distinct" draws the parameters of
each operator log-uniformly from 0.3 to 30 million. Budgets lie at 20, 50 and 80 % of the way from the least that fits
to what the fastest plan takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, make_plan
from lightning_osdp.planning.solver.knapsack import Option, Solution, solve
from lightning_osdp.planning.spec.model import (
    UNATTRIBUTED,
    LinearInBatch,
    ModelProfile,
    Moment,
    Operator,
    ParameterInfo,
    RepeatedBlock,
)
from lightning_osdp.planning.whatif import hardware
from lightning_osdp.planning.whatif.simulate import problem_for_hardware
from lightning_osdp.report.operator_runs import describe_operator_choice, group_runs

Menus = list[list[Option]]
MEGABYTE = 10**6
RANKS, LATENCY_S, S_PER_BYTE = 8, 2e-5, 1e-10
EVERYTHING = 1 << 60
T = TypeVar("T")


def menu(parameters: int) -> list[Option]:
    """12 options of an operator, by the paper's equation 2 (fp32, Adam: 16 bytes of state per parameter)."""
    whole = 4 * parameters
    rows = []
    for passes, resident in ((2.0, 4 * whole), (2.1, 4 * whole // RANKS + whole), (3.0, 4 * whole // RANKS)):
        for slices in (1, 2, 4, 8):
            time_s = passes * (RANKS - 1) * (slices * LATENCY_S + S_PER_BYTE * whole / RANKS)
            rows.append(Option(time_s, resident, 2 * whole // slices))
    return rows


def menus(operators: int, identical: bool, seed: int) -> Menus:
    random_ = random.Random(seed)
    if not identical:
        return [menu(int(10 ** random_.uniform(5.5, 7.5))) for _ in range(operators)]
    hidden = random_.choice([768, 1024, 1280, 1600, 2048])
    weights = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    layer = [menu(rows * columns + rows) for rows, columns in weights]
    return [layer[index % 4] for index in range(operators)]


def budget_bytes(instance: Menus, share: float) -> int:
    most = solve(instance, EVERYTHING).peak_bytes
    try:
        solve(instance, 0)
    except InfeasibleError as error:
        return int(error.needed_bytes + share * (most - error.needed_bytes))
    return 0


def highs(instance: Menus, budget: int, limit_s: float) -> tuple[float, bool]:
    """Time of HiGHS's plan in seconds and whether it proved it. Scaled, since its gap and feasibility are absolute."""
    options = [option for rows in instance for option in rows]
    owner = np.array([index for index, rows in enumerate(instance) for _ in rows])
    count, largest = len(instance), len(options)
    columns = np.arange(largest)
    unit = budget / 1e4
    entries = [
        (np.ones(largest), owner, columns),
        (np.array([o.resident_bytes for o in options]) / unit, np.full(largest, count), columns),
        (np.array([o.transient_bytes for o in options]) / unit, count + 1 + owner, columns),
        (np.ones(1), np.array([count]), np.array([largest])),
        (-np.ones(count), count + 1 + np.arange(count), np.full(count, largest)),
    ]
    values, rows, cols = (np.concatenate(column) for column in zip(*entries, strict=True))
    matrix = coo_array((values, (rows, cols)), shape=(2 * count + 1, largest + 1)).tocsr()
    cost = np.array([o.time_s for o in options] + [0.0])
    result = milp(
        cost * (1e4 / cost.max()),
        integrality=np.append(np.ones(largest), 0),
        bounds=Bounds(0, np.append(np.ones(largest), np.inf)),
        constraints=LinearConstraint(
            matrix,
            np.concatenate([np.ones(count), np.full(count + 1, -np.inf)]),
            np.concatenate([np.ones(count), [1e4], np.zeros(count)]),
        ),
        options={"mip_rel_gap": 0.0, "time_limit": limit_s},
    )
    if result.x is None:
        return float("inf"), False
    return float(cost @ np.append(np.round(result.x[:-1]), 0.0)), result.status == 0


def table_programme(instance: Menus, budget: int, cap: int) -> float:
    """The textbook's table: least time for each whole megabyte, bytes rounded up so that the plan fits.

    It knows no maximum, so it is given the right cap, which in earnest it would have to try out.
    """
    room = (budget - cap) // MEGABYTE
    best = np.zeros(room + 1)
    for rows in instance:
        following = np.full(room + 1, np.inf)
        for option in rows:
            taken = -(-option.resident_bytes // MEGABYTE)
            if option.transient_bytes <= cap and taken <= room:
                np.minimum(following[taken:], best[: room + 1 - taken] + option.time_s, out=following[taken:])
        best = following
    return float(best[-1])


def timed(action: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def chosen_cap(instance: Menus, solution: Solution) -> int:
    return max(rows[choice].transient_bytes for rows, choice in zip(instance, solution.choices, strict=True))


def compare(operators: int, identical: bool, seeds: Sequence[int], limit_s: float) -> None:
    """One line: medians over the seeds and three budgets."""
    ours, theirs, table, proven, worse, coarse, gap = [], [], [], 0, 0.0, 0.0, 0.0
    for seed in seeds:
        instance = menus(operators, identical, seed)
        for share in (0.2, 0.5, 0.8):
            budget = budget_bytes(instance, share)
            solution, seconds = timed(lambda i=instance, b=budget: solve(i, b))
            assert solution.optimal
            gap = max(gap, 1 - solution.lower_bound_s / solution.time_s)
            ours.append(seconds)
            (best_s, done), seconds = timed(lambda i=instance, b=budget: highs(i, b, limit_s))
            theirs.append(seconds)
            proven += done
            worse = max(worse, best_s / solution.time_s - 1)
            cap = chosen_cap(instance, solution)
            coarse_s, seconds = timed(lambda i=instance, b=budget, c=cap: table_programme(i, b, c))
            table.append(seconds)
            coarse = max(coarse, coarse_s / solution.time_s - 1)
    ratios = sorted(h / o for h, o in zip(theirs, ours, strict=True))
    own, table_ms = statistics.median(ours) * 1e3, statistics.median(table) * 1e3
    print(
        f"{operators:6d} {'identical' if identical else 'distinct':9s}"
        f"  ours {own:7.1f} ms (worst {max(ours) * 1e3:7.1f}, gap {gap:.0e})"
        f"   HiGHS {statistics.median(theirs) * 1e3:8.1f} ms, proven {proven}/{len(ours)}, "
        f"{statistics.median(ratios):6.0f}x (least {ratios[0]:.0f}x), plan up to {worse:.0e} slower"
        f"   MB table {table_ms:7.1f} ms, {table_ms / own:5.1f}x, plan up to {coarse:.0e} slower",
        flush=True,
    )


def growth(seeds: Sequence[int]) -> None:
    """Median milliseconds from 10 to 10,000 operators."""
    print("\noperators   distinct (ms)   identical (ms)")
    for operators in (10, 30, 100, 300, 1000, 3000, 10_000):
        cells = []
        for identical in (False, True):
            runs = []
            for seed in seeds:
                instance = menus(operators, identical, seed)
                budget = budget_bytes(instance, 0.5)
                runs.append(timed(lambda i=instance, b=budget: solve(i, b))[1])
            cells.append(statistics.median(runs) * 1e3)
        print(f"{operators:9d}   {cells[0]:13.1f}   {cells[1]:14.1f}", flush=True)


def linear(name: str, inputs: int, outputs: int, tokens: int) -> Operator:
    """A Linear with bias in bf16, its states those of Adam in fp32 with a master copy."""
    elements = inputs * outputs
    weight = ParameterInfo(
        name=f"{name}.weight", shape=(outputs, inputs), element_bytes=2, optimizer_bytes=12 * elements
    )
    bias = ParameterInfo(name=f"{name}.bias", shape=(outputs,), element_bytes=2, optimizer_bytes=12 * outputs)
    return Operator(
        name=name,
        kind="Linear",
        parameters=(weight, bias),
        flops_per_sample=6.0 * tokens * elements,
        split_dims=(1, 0),
        output_dims=(0,),
        input_per_sample=2.0 * tokens * inputs,
        output_per_sample=2.0 * tokens * outputs,
    )


def gpt(layers: int, hidden: int, tokens: int, vocabulary: int = 50257) -> ModelProfile:
    """A GPT as the trace would give it: activations in bf16, attention without its matrix kept."""
    row = 2.0 * tokens * hidden
    saved = {"norm1": row, "qkv": 3 * row, "proj": row, "norm2": row, "up": 8 * row, "down": row}
    operators, moments, blocks = [linear("embed", vocabulary, hidden, 0)], [], []
    live = row

    def moment(phase: str, operator: int, extra: float = 0.0) -> None:
        moments.append(Moment(phase=phase, operator=operator, live=LinearInBatch(per_sample=live + extra)))

    moment("forward", 0)
    for layer in range(layers):
        name, first, before = f"blocks.{layer}", len(moments), live
        own = {}
        for part, inputs, outputs in (("qkv", 1, 3), ("proj", 1, 1), ("up", 1, 4), ("down", 4, 1)):
            own[part] = len(operators)
            operators.append(linear(f"{name}.{part}", inputs * hidden, outputs * hidden, tokens))
        for part in ("norm1", "qkv", "proj", "norm2", "up", "down"):
            live += saved[part]
            moment("forward", own.get(part, UNATTRIBUTED))
        blocks.append((name, tuple(own.values()), (first, len(moments) - 1), before, live))
    operators.append(linear("head", hidden, vocabulary, tokens))
    moment("forward", len(operators) - 1, 6.0 * tokens * vocabulary)
    moment("backward", len(operators) - 1, 6.0 * tokens * vocabulary)
    spans = []
    for _, members, *_ in reversed(blocks):
        start = len(moments)
        qkv, proj, up, down = members
        for part, operator in (("down", down), ("up", up), ("norm2", UNATTRIBUTED), ("proj", proj), ("qkv", qkv)):
            moment("backward", operator, 5 * row)
            live -= saved[part]
        live -= saved["norm1"]
        spans.append((start, len(moments) - 1))
    moment("backward", 0)
    attention = 4.0 * tokens * tokens * hidden
    return ModelProfile(
        fingerprint="gpt",
        operators=tuple(operators),
        moments=tuple(moments),
        batch_size=1,
        unattributed_flops_per_sample=3 * attention * layers,
        blocks=tuple(
            RepeatedBlock(
                name=name,
                kind="Block in blocks",
                operators=members,
                forward=forward,
                backward=backward,
                recompute_saves=LinearInBatch(per_sample=after - before - row),
                live_before_forward=LinearInBatch(per_sample=before),
                live_before_backward=LinearInBatch(per_sample=after + row),
                unattributed_flops_per_sample=attention,
            )
            for (name, members, forward, before, after), backward in zip(blocks, reversed(spans), strict=True)
        ),
    )


def sweep(layers: int, hidden: int, repeats: int, limit_gib: int | None = None) -> None:
    """Plans from batch size 1 to 128, and prints the plan."""
    model = gpt(layers, hidden, 2048)
    limit = limit_gib << 30 if limit_gib else None
    problem = problem_for_hardware(model, hardware.load("8xh100-80gb-nvlink+200gbit"), 64, limit, dtype="bf16")
    rule = BatchSizePolicy(max_batch_size=128)
    plans, seconds = zip(*(timed(lambda: make_plan(problem, rule)) for _ in range(repeats)), strict=True)
    plan = plans[0]
    print(f"GPT of {layers} layers, hidden size {hidden}: {model.num_parameters / 1e9:.1f} billion parameters,")
    print(f"{len(model.operators)} operators, {len(model.blocks)} blocks, {len(model.moments)} moments, 64 devices")
    tried, median = len(plan.frontier), statistics.median(seconds)
    print(f"{tried} batch sizes up to {plan.frontier[-1].batch_size}: {median:.3f} s (best {min(seconds):.3f} s)")
    step_s, again = plan.predicted.step_time_s, len(plan.recomputed)
    print(f"batch size {plan.batch_size}, {again} blocks recomputed, {step_s:.2f} s a step")
    for run in group_runs(plan.operators)[:12]:
        first = run.operators[0]
        print(f"  {run.pattern}: {describe_operator_choice(first)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, and HiGHS stops after 5 s")
    parser.add_argument("--sweep", action="store_true", help="plan a GPT-3 over the batch sizes instead")
    given = parser.parse_args()
    quick = given.quick
    if given.sweep:
        print("with the memory that an H100 has, and with so much that all batch sizes are possible:\n")
        for limit_gib in (None, 1500):
            sweep(*((4, 1024, 1) if quick else (96, 12288, 5)), limit_gib)
            print()
        return
    seeds, limit_s = (range(1), 5.0) if quick else (range(3), 60.0)
    print(f"12 options, {len(seeds)} seed(s) x 3 budgets, medians. HiGHS stops after {limit_s:.0f} s: where it has not")
    print(
        "proven its plan, the ratio is a lower bound. The table is given the right cap and knows whole megabytes only."
    )
    for operators in (24, 96, 1000):
        for identical in (False, True):
            compare(operators, identical, seeds, limit_s)
    growth(seeds)


if __name__ == "__main__":
    main()
