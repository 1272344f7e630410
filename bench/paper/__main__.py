"""Plans the OSDP paper's settings on the paper's machine, and writes docs/paper.md.

    python -m bench paper [--quick] [--docs FOLDER]

Nothing is measured here: costs come from the hardware's description in the package (eight TITAN RTX, PCIe 3.0).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.paper import page
from bench.paper.models import HEADLINE, SEQUENCES, SETTINGS, Setting, describe, in_batches_of
from bench.paper.systems import System, fsdp_per_block, fsdp_per_operator, osdp
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.whatif.hardware import Hardware, load
from lightning_osdp.planning.whatif.simulate import problem_for_hardware

ROOT = Path(__file__).resolve().parents[2]
HARDWARE, DEVICES = "titan-rtx-pcie3", 8
LIMITS_GIB = (8, 16)
SET_ASIDE_BYTES = 800 << 20
"""What the authors' scheduler keeps free of the limit (extra_overhead in OSDP_modules/Profiler_output.py)."""

PLAIN = SearchConstraints(activation_checkpointing=False)

SYSTEMS: dict[str, System] = {
    page.OPERATOR: fsdp_per_operator,
    page.BLOCK: fsdp_per_block,
    page.BASE: partial(osdp, wishes=replace(PLAIN, slice_granularity=1, tensor_parallel=False)),
    page.SPLIT: partial(osdp, wishes=replace(PLAIN, tensor_parallel=False)),
    page.TENSOR: partial(osdp, wishes=PLAIN),
    page.OPERATOR_AGAIN: partial(fsdp_per_operator, recomputed=True),
    page.BLOCK_AGAIN: partial(fsdp_per_block, recomputed=True),
    page.SPLIT_AGAIN: partial(osdp, wishes=SearchConstraints(tensor_parallel=False)),
    page.AGAIN: partial(osdp, wishes=SearchConstraints()),
}


@dataclass(frozen=True)
class Assumptions:
    """What a scenario takes for granted."""

    title: str
    hardware: Hardware
    sequences: int = SEQUENCES


def slower_links(hardware: Hardware) -> Hardware:
    """The bus bandwidths that the authors' own tables imply.

    At the smallest batch of their table and width 8192 a layer (3.22 GB) takes 1.2456 s replicated and 2.4386 s
    sharded (time_map in OSDP_modules/Profiler_output.py). Taken as communication and nothing else that is
    2 * 7/8 * 3.22 GB and 3 * 7/8 * 3.22 GB over each link.
    """
    layer_bytes = 4 * 12 * 8192**2
    replicated = 2 * 7 / 8 * layer_bytes / 1.2456
    sharded = 3 * 7 / 8 * layer_bytes / 2.4386
    wire = hardware.within_node.model_copy(
        update={
            "all_reduce_bytes_per_s": replicated,
            "all_gather_bytes_per_s": sharded,
            "reduce_scatter_bytes_per_s": sharded,
        }
    )
    return hardware.model_copy(update={"within_node": wire})


def scenarios(hardware: Hardware) -> tuple[Assumptions, ...]:
    """The first is the one that the page shows in full."""
    return (
        Assumptions("As published", hardware),
        Assumptions("Batches of single sequences", hardware, sequences=1),
        Assumptions("Links as slow as the authors' tables", slower_links(hardware)),
    )


def row(setting: Setting, model: ModelProfile, assumed: Assumptions, limit_gib: int) -> page.Row:
    """One setting under one limit, by every system."""
    scaled = in_batches_of(model, assumed.sequences)
    problem = problem_for_hardware(scaled, assumed.hardware, DEVICES, limit_gib << 30)
    problem = replace(problem, overhead_bytes=SET_ASIDE_BYTES)
    results = {name: system(problem, BatchSizePolicy()) for name, system in SYSTEMS.items()}
    return page.Row(setting, model.num_parameters, limit_gib << 30, results)


def run(
    settings: Sequence[Setting], assumptions: Sequence[Assumptions], say: Callable[[str], None]
) -> tuple[list[page.Scenario], page.Row]:
    """Every scenario, and the authors' headline case under its limit of 8 GB."""
    models = {}
    for setting in (*settings, HEADLINE):
        start = time.perf_counter()
        models[setting] = describe(setting)
        say(f"{setting.name}: read in {time.perf_counter() - start:.1f} s")
    found = []
    for assumed in assumptions:
        start = time.perf_counter()
        rows = tuple(row(setting, models[setting], assumed, limit) for setting in settings for limit in LIMITS_GIB)
        found.append(page.Scenario(assumed.title, rows, assumed.sequences))
        say(f"{assumed.title}: planned in {time.perf_counter() - start:.1f} s")
    return found, row(HEADLINE, models[HEADLINE], assumptions[0], LIMITS_GIB[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small setting and one scenario; writes nothing")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder to write to")
    options = parser.parse_args()
    assumptions = scenarios(load(HARDWARE))
    settings = SETTINGS
    if options.quick:
        settings, assumptions = tuple(one for one in SETTINGS if one.name == "2 x 6144"), assumptions[:1]
    found, headline = run(settings, assumptions, lambda words: print(words, file=sys.stderr, flush=True))
    for scenario in found:
        print(f"\n{scenario.title}\n")
        print("\n".join(page.summary(scenario)))
    if not options.quick:
        template = (Path(__file__).parent / "template.md").read_text()
        print(f"\nwritten: {page.write(found, headline, template, options.docs)}")


if __name__ == "__main__":
    main()
