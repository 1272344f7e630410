"""A step of wide layers and of an embedding table under each mode, on ranks of this machine, in turns.

    python -m bench tensor-parallel [--ranks 2] [--rounds 12]

Three MLPs of width 768 with 64 tokens a rank under AdamW, a table of 400,000 x 64 with 4,096 indices a rank under SGD,
and a recommender (four tables of 322,000 rows of 64 in all, 512 samples a rank, AdamW), without planning: all operators
have the mode, ``zdp`` being FSDP with a unit per operator; the recommender's MLP is replicated beside tables in ``tp``.
In every round each mode makes a step. Shown are the median of the rounds, the median of each round's ratio to that of
replicated training, and the bytes of a rank's parameters and optimizer states.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope, TensorSplit
from lightning_osdp.state.guarded_parameter import local_data
from tests.support.models import some_cluster
from tests.support.ranks import run_ranks

WIDTH, TOKENS, LAYERS = 768, 64, 3
ROWS, COLUMNS, INDICES = 400_000, 64, 4096
TABLES, SAMPLES = (160_000, 120_000, 40_000, 2_000), 512
WARMUP_ROUNDS = 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, COLUMNS) for rows in TABLES)
        self.top = nn.Sequential(nn.Linear(len(TABLES) * COLUMNS, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        return self.top(torch.cat(looked_up, dim=1))  # type: ignore[no-any-return]


def make_recommender() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model = Recommender()
    ids = torch.stack([torch.randint(rows, (SAMPLES,)) for rows in TABLES], dim=1)
    return model, torch.optim.AdamW(model.parameters()), ids


def make_mlps() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model = nn.Sequential(*(MLP() for _ in range(LAYERS)))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(TOKENS, WIDTH)


def make_table() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model = nn.Sequential(nn.Embedding(ROWS, COLUMNS))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(ROWS, (INDICES,))


CASES = {"three wide MLPs": make_mlps, "embedding table": make_table, "recommender": make_recommender}


def plan_of(model: nn.Module, mode: Mode, ranks: int) -> ExecutionPlan:
    """Return a plan in which each operator has the mode."""
    operators, scopes = [], {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        split, own = None, mode
        if name.startswith("top") and mode == Mode.TP:
            own = Mode.DP
        elif mode == Mode.TP:
            scope = None if isinstance(module, nn.Embedding) else f"{name.partition('.')[0]}.down"
            role = TensorRole.COLUMN if name.endswith("up") else TensorRole.ROW
            split = TensorSplit(degree=ranks, role=TensorRole.EMBEDDING if scope is None else role, scope=scope)
            scopes |= {} if scope is None else {scope: TensorScope()}
        operators.append(OperatorPlan(name=name, slices=(own,), num_parameters=0, tensor=split))
    return ExecutionPlan.minimal(operators, some_cluster(ranks), scopes)


def make_step(case: str, mode: Mode, ranks: int) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return what makes a step and returns its seconds on this rank, and what counts the bytes of its states."""
    torch.manual_seed(0)
    model, optimizer, sample = CASES[case]()
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, plan_of(model, mode, ranks), [optimizer])

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        engine.before_forward()
        model(sample).square().mean().backward()
        engine.finish_backward()
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    def count_bytes() -> int:
        states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
        return sum(local_data(p).nbytes for p in model.parameters()) + sum(local_data(each).nbytes for each in states)

    return step, count_bytes


def measure(rank: int, ranks: int, rounds: int) -> dict[str, dict[str, tuple[list[float], int]]]:
    """Return the seconds in each round and the bytes of states of each mode, by case."""
    found: dict[str, dict[str, tuple[list[float], int]]] = {}
    for case in CASES:
        made = {mode.value: make_step(case, mode, ranks) for mode in Mode}
        times = [{mode: step() for mode, (step, _) in made.items()} for _ in range(WARMUP_ROUNDS + rounds)]
        found[case] = {
            mode: ([each[mode] for each in times[WARMUP_ROUNDS:]], count_bytes())
            for mode, (_, count_bytes) in made.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    results: list[dict[str, Any]] = run_ranks(measure, args.ranks, args.rounds)
    print(f"{'case':<18}{'mode':<6}{'ms a step':>10}{'of replicated':>15}{'MiB of states':>15}")
    for case, by_mode in results[0].items():
        for mode, (times_s, states_bytes) in by_mode.items():
            ratio = statistics.median(s / base for s, base in zip(times_s, by_mode["dp"][0], strict=True))
            median_ms = statistics.median(times_s) * 1e3
            print(f"{case:<18}{mode:<6}{median_ms:>10.1f}{ratio:>15.2f}{states_bytes / (1 << 20):>15.1f}")


if __name__ == "__main__":
    main()
