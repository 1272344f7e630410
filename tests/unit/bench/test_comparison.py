"""The side-by-side benchmark: what it runs next, what it remembers, what it says; and that a limit is one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from bench.comparison import cleanup, document, launch, overview, report, step_breakdown, step_log, systems
from bench.comparison.batch_probe import (
    LARGEST,
    SLOW_STEP_S,
    estimate_largest,
    gains_nothing,
    is_flat,
    longest_step,
    next_sizes,
)
from bench.comparison.cells import Cell, is_easier
from bench.comparison.jobs import SETTINGS, Job
from bench.comparison.records import Runs
from bench.comparison.tournament import Comparer, Effort
from bench.multinode import emulated_cluster

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


def search(largest: int, estimate: int | None) -> tuple[int, list[tuple[int, ...]]]:
    """The size that the search ends with where ``largest`` is the last that lives, and the processes it took."""
    lived, dead, processes = 0, None, []
    while sizes := next_sizes(lived, dead, None if processes else estimate):
        processes.append(sizes)
        alive = [size for size in sizes if size <= largest]
        lived = max([lived, *alive])
        if len(alive) < len(sizes):
            dead = sizes[len(alive)]
    return lived, processes


@pytest.mark.parametrize("estimate", [None, 1, 7, 40])
@pytest.mark.parametrize("largest", [0, 1, 2, 3, 5, 8, 13, 31, 47, LARGEST])
def test_next_sizes_ends_within_an_eighth_of_largest_size_in_few_processes(largest: int, estimate: int | None) -> None:
    found, processes = search(largest, estimate)

    assert found <= largest
    assert largest - found <= max(1, found // 8)
    assert found > 0 or largest == 0
    assert len(processes) <= 4
    assert all(list(sizes) == sorted(set(sizes)) for sizes in processes)


def test_estimate_largest_extrapolates_measured_memory_linearly() -> None:
    assert estimate_largest({1: 110, 4: 140}, 200) == 10
    assert estimate_largest({1: 110}, 200) is None
    assert estimate_largest({1: 110, 4: 110}, 200) is None
    assert estimate_largest({1: 110, 4: 140}, 50) == 1


def test_gains_nothing_is_true_where_larger_sizes_promise_no_speedup() -> None:
    flat = {8: 4.4, 16: 8.4, 32: 16.4}
    assert gains_nothing(flat, 40)  # 0.4 s, and 0.5 for each sample
    assert not gains_nothing({8: 8.0, 16: 12.0, 32: 20.0}, 40)  # 4 s, and 0.5
    assert not gains_nothing({16: 8.4, 32: 16.4}, 40)
    for slow in (8, 16, 32):  # moments of the machine
        steep = {8: 8.0, 16: 12.0, 32: 20.0}
        assert not gains_nothing(steep | {slow: 1.4 * steep[slow]}, 40)


def test_is_flat_tolerates_one_slow_size() -> None:
    assert not is_flat([9.9, 9.4])
    assert not is_flat([5.0, 9.9, 9.4])
    assert not is_flat([9.9, 9.4, 12.0])
    assert is_flat([5.0, 9.9, 9.4, 10.0])


class Machine:
    """Stands in for the ranks: systems with a base memory, a slope, and a step time. Counts what it was asked."""

    memory: ClassVar = {"ddp": (300, 20), "shard": (150, 25), "fairscale-op": (140, 30)}
    memory |= dict.fromkeys(systems.OWN, (200, 20))

    def __init__(self, **overhead_s: float) -> None:
        self.overhead_s = {"ddp": 0.5, "shard": 1.5, "fairscale-op": 2.0, "osdp": 0.4, "osdp-no-tp": 0.6} | overhead_s
        self.jobs: list[Job] = []

    def run(self, job: Job) -> dict[str, Any]:
        self.jobs.append(job)
        base = job.how.base
        fixed, slope = self.memory[base]
        budget = (job.memory_bytes or 1 << 60) // MIB
        slow = 3 if job.where.rate else 1
        sizes = job.sizes or (max(1, (budget - fixed) // slope),)
        lived = [size for size in sizes if fixed + slope * size <= budget]
        result = {
            "outcome": "ok" if len(lived) == len(sizes) else "out of memory",
            "peak_bytes": (fixed + slope * max(lived, default=0)) * MIB,
            "seconds": 1.0,
            "error": "",
            "ready": {"setup_s": 9.0 if job.repeat == 0 else 1.0},
            "sizes": [
                {
                    "batch_size": size,
                    "step_s": 0.1 * size + slow * self.overhead_s[base],
                    "peak_bytes": (fixed + slope * size) * MIB,
                }
                for size in lived
            ],
        }
        if base in systems.OWN:
            result["plan"] = {"batch_size": sizes[0], "parameters": {"dp": 3, "zdp": 1}, "predicted": {}}
        return result


def comparer(machine: Machine, file: Path) -> Comparer:
    runs = Runs(file, machine.run, lambda job, result: None)
    return Comparer(runs, [systems.parse(s) for s in ("ddp", "shard", "fairscale-op")], Effort(), "cpu")


CELLS = [
    Cell("nd-quick", setting, level, memory * MIB)
    for setting in ("2-loopback", "2-1gbit")
    for level, memory in (("plenty", 700), ("tight", 260))
]


def test_comparer_finds_best_batch_sizes_and_reports_out_of_memory(tmp_path: Path) -> None:
    machine = Machine()
    compared = [comparer(machine, tmp_path / "r.jsonl").compare(cell) for cell in CELLS[:2]]

    plenty, tight = compared
    assert plenty.row("ddp").batch_size in (18, 19, 20)  # 20 fit
    assert tight.row("ddp").status == "out of memory"
    assert tight.row("shard").batch_size == 4
    assert tight.osdp.batch_size == 3
    assert plenty.osdp.detail["cold_setup_s"] == 9.0
    assert plenty.osdp.detail["warm_setup_s"] == 1.0
    assert len(plenty.row("fairscale-op").repeats) == 3, "the paper's baseline is always a finalist"
    finals = [job for job in machine.jobs if job.purpose == "final" and job.memory_bytes == 700 * MIB]
    assert next(job.system for job in finals if job.repeat == 1) == "osdp"
    assert [job.repeat for job in finals] == sorted(job.repeat for job in finals), "in turns"


def test_osdp_without_tensor_parallelism_runs_in_turns_with_osdp_and_is_no_competitor(tmp_path: Path) -> None:
    machine = Machine(ddp=60.0)
    runs = Runs(tmp_path / "r.jsonl", machine.run, lambda job, result: None)
    found = Comparer(runs, systems.selected("ddp+alloc,osdp-no-tp"), Effort(), "cpu").compare(CELLS[0])
    own, best = found.row("osdp-no-tp"), found.best()
    assert own is not None
    assert best is not None
    assert (best.system, len(own.repeats), own.batch_size) == ("ddp+alloc", 3, found.osdp.batch_size)
    finals = [job.system for job in machine.jobs if job.purpose == "final" and job.how.base in systems.OWN]
    assert finals == ["osdp", "osdp-no-tp"] * 3
    (versus,) = [each for each in report.totals([found]) if each.what == "OSDP without tensor parallelism"]
    assert versus.ratios[0] == found.osdp.samples_per_s / own.samples_per_s > 1


def test_comparer_skips_harder_cells_of_systems_that_failed_or_cannot_win(tmp_path: Path) -> None:
    machine = Machine(shard=60.0)
    one = comparer(machine, tmp_path / "r.jsonl")
    compared = [one.compare(cell) for cell in CELLS]

    searched = [(job.system, job.setting, job.memory_bytes) for job in machine.jobs if job.purpose == "search"]
    assert ("ddp", "2-1gbit", 260 * MIB) not in searched
    assert compared[3].row("ddp").status == "out of memory"
    assert ("shard", "2-1gbit", 700 * MIB) not in searched
    assert compared[2].row("shard").status == "bounded"


class MachineWithLinkMemory(Machine):
    """Sending over a link takes memory."""

    def run(self, job: Job) -> dict[str, Any]:
        less = 60 * MIB if job.where.rate and job.memory_bytes else 0
        found = super().run(replace(job, memory_bytes=job.memory_bytes and job.memory_bytes - less))
        self.jobs[-1] = job
        return found


def test_comparer_reuses_batch_size_of_faster_link_without_new_search(tmp_path: Path) -> None:
    machine, others = Machine(**{"fairscale-op": 0.6, "shard": 0.6}), ("ddp", "shard", "fairscale-op")
    one = comparer(machine, tmp_path / "r.jsonl")
    loopback, link = (one.compare(CELLS[at]) for at in (0, 2))
    there = [job for job in machine.jobs if job.setting == "2-1gbit" and job.system != "osdp"]

    assert {job.purpose for job in there} == {"final"}
    assert sorted((job.system, job.repeat) for job in there) == sorted(product(others, range(3))), "each once"
    for system in others:
        assert link.row(system).batch_size == loopback.row(system).batch_size
        assert len(link.row(system).repeats) == 3


def test_comparer_retries_smaller_batch_where_size_of_faster_link_does_not_fit(tmp_path: Path) -> None:
    one = comparer(MachineWithLinkMemory(**{"fairscale-op": 0.3}), tmp_path / "r.jsonl")
    loopback, link = (one.compare(CELLS[at]).row("fairscale-op").batch_size for at in (0, 2))

    assert loopback in (17, 18)  # 18 fit
    assert link in (15, 16)  # 16 fit


class MachineWithOneSizePerProcess(Machine):
    """A process has time for one size."""

    def run(self, job: Job) -> dict[str, Any]:
        found = super().run(replace(job, sizes=job.sizes[:1]))
        self.jobs[-1] = job
        late = len(job.sizes) > 1 and found["outcome"] == "ok"
        return found | ({"stop": {"event": "stop", "why": "late"}} if late else {})


def test_comparer_retries_sizes_that_a_process_had_no_time_for(tmp_path: Path) -> None:
    at_leisure, hurried = (
        comparer(kind(), tmp_path / f"{kind.__name__}.jsonl") for kind in (Machine, MachineWithOneSizePerProcess)
    )

    for cell in CELLS:
        found = {row.system: row for row in hurried.compare(cell).rows}
        for row in at_leisure.compare(cell).rows:
            assert abs(found[row.system].batch_size - row.batch_size) <= max(1, row.batch_size // 8)
            assert found[row.system].status == row.status


def test_comparer_measures_fewer_steps_of_slow_systems(tmp_path: Path) -> None:
    machine = Machine(shard=3.0)
    comparer(machine, tmp_path / "r.jsonl").compare(CELLS[0])
    steps = {
        kind: {job.system: job.steps for job in machine.jobs if job.purpose == kind} for kind in ("search", "final")
    }

    assert steps["search"]["shard"] < steps["search"]["ddp"], "the last process knows how slow the first ones were"
    assert steps["final"]["shard"] < steps["final"]["ddp"] == steps["final"]["osdp"]


def test_comparer_timeout_covers_known_slow_steps(tmp_path: Path) -> None:
    machine = Machine(shard=60.0)
    comparer(machine, tmp_path / "r.jsonl").compare(CELLS[0])
    times = {job.system: (job.warm_up + job.steps, job.timeout_s) for job in machine.jobs if job.purpose == "final"}

    steps, timeout_s = times["shard"]
    assert timeout_s > steps * 60.0 > Effort().timeout_s / 2
    assert times["ddp"][1] == Effort().timeout_s
    searches = [job for job in machine.jobs if job.purpose == "search"]
    assert all(job.timeout_s == Effort().timeout_s for job in searches if job.system == "ddp")
    assert any(job.timeout_s > (job.warm_up + job.steps) * 60.0 for job in searches if job.system == "shard")


def test_longest_step_grows_at_most_in_proportion_to_batch_size() -> None:
    assert longest_step({}, 4) == 0.0
    assert longest_step({8: 10.0, 16: 16.0}, 32) == 32.0
    assert longest_step({8: 10.0, 16: 16.0}, 12) == 16.0


@pytest.mark.parametrize(("step_s", "taken"), [(10.0, 2 + 3), (3.0, 3 + 8)])
def test_recorder_measures_few_slow_steps_where_system_picks_batch_size(
    step_s: float, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    job = Job("final", "nd-quick", "2-loopback", "osdp", (), warm_up=3, steps=8)
    clock = iter(step_s * tick for tick in range(100))
    # Its own clock: other threads read the process's.
    monkeypatch.setattr(step_log, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with step_log.Recorder(job, tmp_path, torch.device("cpu")) as recorder:
        going_on = [recorder.after_step(5) for _ in range(taken)]

    assert going_on == [True] * (taken - 1) + [False]
    (size,) = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert size["steps_s"] == [step_s] * (taken - (2 if step_s > SLOW_STEP_S else 3))


def test_comparer_resumes_from_its_result_file(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    first = comparer(Machine(), file).compare(CELLS[0])
    with file.open("a") as out:
        out.write('{"job": {"purp')  # stopped while writing
    again = Machine()

    assert comparer(again, file).compare(CELLS[0]) == first
    assert again.jobs == []
    comparer(again, file).compare(CELLS[1])
    assert again.jobs
    assert comparer(Machine(), file).compare(CELLS[1]).osdp.status == "ok", "a cut line harms no later one"


def test_is_easier_orders_cells_by_memory_and_link() -> None:
    assert is_easier(CELLS[0], CELLS[3])
    assert is_easier(CELLS[1], CELLS[3])
    assert not is_easier(CELLS[3], CELLS[0])
    assert not is_easier(CELLS[1], CELLS[2])


def test_totals_and_page_match_cell_results(tmp_path: Path) -> None:
    one = comparer(Machine(), tmp_path / "r.jsonl")
    compared = [one.compare(cell) for cell in CELLS]
    best = report.totals(compared)[0]
    expected = [c.osdp.samples_per_s / c.best().samples_per_s for c in compared]

    assert list(best.ratios) == expected
    assert best.words()[2:4] == (f"{geometric_mean(expected):.2f}", f"{fmean(expected):.2f}")
    page = document.write(compared, document.facts(["--quick"], {"abc"}, "cpu"), tmp_path)
    text, runs = page.read_text(), (tmp_path / "benchmarks" / "runs.md").read_text()
    assert "python -m bench comparison --quick" in runs
    assert f"{min(expected):.2f}" in text
    assert "out of memory" in runs
    assert (tmp_path / "benchmarks" / "nd-quick.svg").exists()
    assert len(json.loads((tmp_path / "benchmarks" / "results.json").read_text())["cells"]) == 4
    page.write_text(f"of yesterday\n{document.NOTES}\n\n- Why.\n")
    assert document.write(compared, document.facts(["--quick"], {"abc"}, "cpu"), tmp_path) == page
    assert page.read_text() == f"{text}{document.NOTES}\n\n- Why.\n"


def test_pictures_in_docs_are_drawn_from_the_results(tmp_path: Path) -> None:
    docs = ROOT / "docs" / "benchmarks"
    compared = report.from_json(json.loads((docs / "results.json").read_text()))
    drawn = overview.draw_all(compared, tmp_path)
    assert [file.name for file in drawn] == list(overview.ALT)
    assert all(file.read_bytes() == (docs / file.name).read_bytes() for file in drawn), (
        "python -m bench.comparison.overview"
    )


def test_verdicts_name_warm_start_only_where_measured(tmp_path: Path) -> None:
    compared = comparer(Machine(), tmp_path / "r.jsonl").compare(CELLS[0])
    assert report.verdicts([compared])[-1] == "OSDP's set-up takes 9.0 s at most, the second start 1.0 s"

    detail = {name: value for name, value in compared.osdp.detail.items() if name != "warm_setup_s"}
    once = replace(compared, rows=(replace(compared.osdp, detail=detail),))
    assert report.verdicts([once])[-1] == "OSDP's set-up takes 9.0 s at most"


def test_page_keeps_cells_of_earlier_runs_with_their_origin(tmp_path: Path) -> None:
    slow = comparer(Machine(osdp=5.0), tmp_path / "slow.jsonl")
    document.write([slow.compare(cell) for cell in CELLS[1:3]], document.facts(["--slow"], {"abc"}, "cpu"), tmp_path)
    fast = comparer(Machine(), tmp_path / "fast.jsonl")
    anew = [fast.compare(replace(CELLS[1], memory_bytes=CELLS[1].memory_bytes + MIB)), fast.compare(CELLS[0])]
    page = document.write(anew, document.facts(["--fast"], {"def"}, "cpu") | {"machine": "another"}, tmp_path)

    everything = json.loads((tmp_path / "benchmarks" / "results.json").read_text())
    cells = report.from_json(everything)
    assert [(c.cell.setting, c.cell.level) for c in cells] == [
        ("2-loopback", "plenty"), ("2-loopback", "tight"), ("2-1gbit", "plenty"),
    ]  # fmt: skip
    assert [c.made["commits"] for c in cells] == [["def"], ["def"], ["abc"]]
    assert cells[1].rows == anew[0].rows
    assert "- another: 2 of 3 cells" in page.read_text()
    runs = (tmp_path / "benchmarks" / "runs.md").read_text()
    assert all(runs.count(f"comparison {word}    (") == 1 for word in ("--slow", "--fast"))
    on_another, here = runs.split("another, 2 of 3 cells:")[1].split(", 1 of 3 cells:")
    assert "--fast" in on_another
    assert "--slow" in here


def test_systems_parse_round_trips_names_with_switches() -> None:
    every = systems.every()
    assert len(every) == len({system.name for system in every}) == 4 * len(systems.BASES)
    assert all(systems.parse(system.name) == system for system in every)
    assert {system.checkpointing for system in systems.strongest()} == {False, True}, "either may be the fastest"
    assert [s.name for s in systems.selected("ddp+ckpt,shard")][:3] == ["ddp+ckpt", "shard", "shard+alloc"]
    with pytest.raises(ValueError, match="no system 'dpp'"):
        systems.parse("dpp")


def test_is_left_over_is_true_only_for_ended_processes() -> None:
    assert not cleanup.is_left_over(f"bench{os.getpid()}n0")
    assert cleanup.is_left_over("bench99999999n0")
    assert not cleanup.is_left_over("benchmark")


# Real ranks, each with its own limit: root and cgroup v1.

TOUCH = """
import os, re, sys, json
os.environ["OMP_NUM_THREADS"] = "1"
from pathlib import Path
from bench.multinode import emulated_cluster
from bench.comparison import launch
from bench.comparison.jobs import Job
ballast = bytearray(os.urandom(64 << 20))  # what a rank inherits

def work(job, folder, cache):
    rank = int(os.environ["RANK"])
    emulated_cluster.raise_limit(raised << 20)
    anonymous = int(re.findall(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[0]) << 10
    took = os.urandom(job.sizes[0] << 20)
    (folder / f"rank{rank}.jsonl").write_text(json.dumps({"event": "own", "bytes": anonymous}) + "\\n")
    return len(took) < 0

found = []
for setting, mebibytes, raised in json.loads(sys.argv[1]):
    job = Job("search", "nd-quick", setting, "ddp", (mebibytes,), memory_bytes=700 << 20, timeout_s=20)
    found.append(launch.run(job, Path("/nonexistent"), work))
print(json.dumps(found))
"""


@pytest.mark.lab
@pytest.mark.skipif(
    os.geteuid() != 0 or not emulated_cluster.CGROUPS.joinpath("memory.limit_in_bytes").exists(), reason="lab"
)
def test_launch_charges_inherited_memory_and_kills_rank_at_limit() -> None:
    def left_over() -> set[Path]:
        found = (*emulated_cluster.CGROUPS.glob("bench*"), *Path("/var/run/netns").glob("bench*"))
        return {path for path in found if cleanup.is_left_over(path.name)}

    before = left_over()  # of comparisons that were killed
    runs = [("2-loopback", 0, 0), ("2-1gbit", 20, 0), ("2-loopback", 640, 0), ("2-loopback", 640, 640)]
    call = [sys.executable, "-c", TOUCH, json.dumps(runs)]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, timeout=200, check=True)
    alive, more, dead, within_raised_limit = json.loads(done.stdout.splitlines()[-1])

    assert alive["outcome"] == "ok"
    assert alive["peak_bytes"] > 64 * MIB
    assert alive["peak_bytes"] > alive["own"]["bytes"] - 4 * MIB, "the pages of the parent were copied and charged"
    assert more["outcome"] == "ok"
    assert 15 * MIB < more["peak_bytes"] - alive["peak_bytes"] < 25 * MIB
    assert dead["outcome"] == "out of memory"
    assert within_raised_limit["outcome"] == "ok", "the profiler's room"
    assert left_over() <= before


def test_settings_names_state_ranks_nodes_and_link() -> None:
    assert SETTINGS["4-2gbit"].ranks == SETTINGS["4-2gbit"].nodes == 4
    assert SETTINGS["2-loopback"].rate is None
    assert SETTINGS["2x2-1gbit"].nodes == 2


def test_outcome_distinguishes_ok_oom_infeasible_slow_and_failed() -> None:
    assert launch.outcome([0, 0], False, False) == "ok"
    assert launch.outcome([-9, 1], True, False) == "out of memory"
    assert launch.outcome([98, 98], False, False) == "infeasible"
    assert launch.outcome([-9, -9], False, True) == "too slow"
    assert launch.outcome([1, 0], False, False) == "failed"


def test_work_attributes_time_to_kind_of_innermost_module() -> None:
    site = "/site-packages"
    assert step_breakdown.work(f"{site}/torch/nn/modules/linear.py", in_backward=False) == "forward"
    assert step_breakdown.work(f"{site}/torch/nn/modules/linear.py", in_backward=True) == "recomputed forward"
    assert step_breakdown.work(f"{site}/torch/optim/adamw.py", in_backward=False) == "optimizer"
    assert (
        step_breakdown.work(f"{site}/lightning_osdp/engine/gradient_buckets.py", in_backward=True)
        == "engine: gradient_buckets.py"
    )
    assert step_breakdown.classify(sys._getframe()) == "other"


def test_other_systems_do_not_import_lightning_osdp() -> None:
    code = (
        "import sys; from bench.comparison import fairscale_loop, lightning_loop, models, worker; "
        "models.build('ic-quick'); sys.exit('lightning_osdp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
