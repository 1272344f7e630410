"""The command line: ``osdp profile | plan | explain | diff | simulate | consolidate``, and LightningCLI's ``osdp fit``.

Exit status: 0 done, 1 nothing fits under the memory limit, 2 bad usage or bad input (one line on the standard error
stream says what). With ``--json`` the standard output is one JSON document and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from rich.console import Console

from lightning_osdp import alone, local, report, settings, training
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPError, OSDPWarning
from lightning_osdp.planning import compare, explain, hardware
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.schedule import BatchRule, Problem
from lightning_osdp.planning.settled import way_of
from lightning_osdp.planning.simulate import SimulatedPoint, problem_on, simulate, tradeoff
from lightning_osdp.planning.units import format_bytes, format_seconds, parse_bytes
from lightning_osdp.planning.wishes import Wishes
from lightning_osdp.sharding import checkpoint

DONE, INFEASIBLE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

PAGE_LIMITS = 8
"""Memory limits on a page's picture of time against memory."""


@dataclass(frozen=True)
class Command:
    """One word after ``osdp``.

    Attributes:
        help: what it does, in one line.
        add_arguments: declares its arguments.
        run: does it; what goes wrong is raised.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


def main(args: list[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    Args:
        args: what follows ``osdp``; None for what the shell gave.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=OSDPWarning)
            warnings.showwarning = _show_warning(warnings.showwarning)
            return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InfeasibleError as error:
        _complain(error)
        return INFEASIBLE
    except (OSDPError, ArgumentError) as error:
        _complain(error)
        return BAD_INPUT
    except BrokenPipeError:  # whoever read our output has seen enough, as in `osdp explain PLAN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _run(args: list[str] | None) -> int:
    words = sys.argv[1:] if args is None else args
    if words and words[0] in training.SUBCOMMANDS:
        training.run(words)
        return DONE
    try:
        given = _parser().parse_args(args)
    except SystemExit as end:  # of --help
        return int(end.code or DONE)
    options = given[given.command]
    try:
        COMMANDS[given.command].run(options)
    except InfeasibleError as error:
        if options.json:
            facts = {"needed_bytes": error.needed_bytes, "memory_limit_bytes": error.budget_bytes}
            _print(json.dumps({"feasible": False, **facts, "message": str(error)}, indent=2))
        raise
    return DONE


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="osdp",
        description="Plans sharded data parallel training, and tells why.",
        epilog=f"osdp {' | '.join(training.SUBCOMMANDS)} train as LightningCLI does, with this strategy (--help: how).",
        exit_on_error=False,
    )
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, command in COMMANDS.items():
        subparser = ArgumentParser(description=command.help, exit_on_error=False)
        command.add_arguments(subparser)
        subparser.add_argument("--json", action="store_true", help="write JSON instead of text")
        subcommands.add_subcommand(name, subparser, help=command.help)
    return parser


def _complain(error: Exception) -> None:
    """One line: what is wrong."""
    print(f"osdp: error: {' '.join(str(error).split())}", file=sys.stderr)


def _show_warning(others: Callable[..., None]) -> Callable[..., None]:
    """Ours in one line, without the source line that raised them."""

    def show(message: Any, category: Any, *rest: Any, **named: Any) -> None:
        if issubclass(category, OSDPWarning):
            print(f"osdp: warning: {message}", file=sys.stderr)
        else:
            others(message, category, *rest, **named)

    return show


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error}") from error


def _check_folders(*paths: str | None) -> None:
    """Refuses files that could not be written, before the work is done."""
    for path in paths:
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigurationError(f"{path} can't be written: there is no folder {Path(path).absolute().parent}")


def _print(text: str) -> None:
    print(text, flush=True)


# -- profile -----------------------------------------------------------------------------------------------------------


def _profile_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, required=True, help="processes, one for each device")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is")
    parser.add_argument("--out", type=str, default="cluster.json", help="file to write (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything (default: %(default)s)")


def _profile(given: Namespace) -> None:
    settings.positive("devices", given.devices)
    _check_folders(given.out)
    kind = given.accelerator
    if kind == "auto":
        kind = alone.default_device_type()
    cluster = local.measure_cluster(given.devices, kind, given.timeout)
    _write(given.out, cluster.model_dump_json(indent=2))
    if given.json:
        _print(cluster.model_dump_json(indent=2))
    else:
        _print(f"{cluster.devices_per_node} x {cluster.device} ({cluster.backend}) written to {given.out}")
        _print(_links_text(cluster))


def _links_text(cluster: Cluster) -> str:
    """What collectives of 16 MiB take, for a first impression."""
    size = 16 << 20
    fits = cluster.link.model_dump()
    times = {name: getattr(cluster.link, name).time_s(size, cluster.ranks) for name in fits}
    return "16 MiB: " + ", ".join(f"{name.replace('_', '-')} {format_seconds(time)}" for name, time in times.items())


# -- plan --------------------------------------------------------------------------------------------------------------


def _plan_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--config", type=str, required=True, help="the YAML that LightningCLI trains from")
    parser.add_argument("--cluster", type=str, help="the hardware, as `osdp profile` wrote it")
    parser.add_argument("--devices", type=int, help="per node, instead of the cluster's")
    parser.add_argument("--memory-limit", type=str, help="per device, such as 16GiB (default: what the device has)")
    parser.add_argument("--batch-size", type=int, help="per device, fixed (default: searched)")
    parser.add_argument("--max-batch-size", type=int, help="the largest that is considered")
    parser.add_argument("--global-batch-size", type=int, help="over all devices, made exactly")
    parser.add_argument(
        "--sharding-group", choices=["auto", "world", "node"], help="ranks that operators are sharded over"
    )
    parser.add_argument("--cache", type=str, help="folder of measurements (default: the user's; '': none)")
    parser.add_argument("--out", type=str, help="file for the plan, to train with")
    parser.add_argument("--html", type=str, help="file for a page with the plan's pictures")


def _plan(given: Namespace) -> None:
    _check_folders(given.out, given.html)
    path = Path(given.config)
    recipe = alone.read_recipe(path)
    # Python finds a script's neighbours; so the configuration's module is found as it would be in training.
    sys.path[:0] = [str(Path.cwd()), str(path.resolve().parent)]
    devices = settings.positive("devices", given.devices)
    outcome = alone.plan_recipe(recipe, devices, **{name: given[name] for name in alone.WISHES if name in given})
    if given.out is not None:
        _write(given.out, outcome.plan.to_json())
    if given.html is not None:
        _write_page(given.html, outcome.plan, outcome.problem)
    if given.json:
        _print(outcome.plan.to_json())
        return
    Console().print(report.plan_table(outcome.plan, None if outcome.from_cache else outcome.profiling_s))


# -- explain and diff --------------------------------------------------------------------------------------------------


def _explain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plan", type=str, help="the plan's JSON file")


def _explain(given: Namespace) -> None:
    found = explain.explanation(_read(given.plan))
    _print(found.model_dump_json(indent=2) if given.json else found.to_text())


def _diff_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("before", type=str, help="a plan's JSON file")
    parser.add_argument("after", type=str, help="another's")


def _diff(given: Namespace) -> None:
    found = compare.difference(_read(given.before), _read(given.after))
    _print(json.dumps(found.model_dump(), indent=2) if given.json else found.to_text())


def _read(path: str) -> ExecutionPlan:
    plan = settings.read_plan(path)
    assert plan is not None
    return plan


# -- simulate ----------------------------------------------------------------------------------------------------------


def _simulate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--config", type=str, required=True, help="the YAML that LightningCLI trains from")
    parser.add_argument("--hardware", type=str, required=True, help="a name, such as h100-80gb-nvlink, or a JSON file")
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of devices (default: 1, 2, 4, ... all)")
    parser.add_argument("--memory-limit", type=str, help="per device, such as 16GiB (default: what the device has)")
    parser.add_argument("--batch-size", type=int, help="per device, fixed (default: searched)")
    parser.add_argument("--max-batch-size", type=int, help="the largest that is considered")
    parser.add_argument("--global-batch-size", type=int, help="over all devices, made exactly")
    parser.add_argument("--dtype", type=str, default="fp32", help="of matrix products (default: %(default)s)")
    parser.add_argument("--html", type=str, help="file for a page with pictures of the largest number that fits")


def _simulate(given: Namespace) -> None:
    found = hardware.load(given.hardware)
    rule = BatchRule(
        settings.positive("batch_size", given.batch_size),
        settings.positive("max_batch_size", given.max_batch_size),
        settings.positive("global_batch_size", given.global_batch_size),
    )
    limit_bytes = parse_bytes(given.memory_limit) if given.memory_limit is not None else None
    devices = given.devices or _doublings(found.devices)
    path = Path(given.config)
    recipe = alone.read_recipe(path)
    sys.path[:0] = [str(Path.cwd()), str(path.resolve().parent)]
    model, wishes = alone.describe_recipe(recipe)
    points = simulate(model, found, devices, limit_bytes, rule, given.dtype, wishes)
    if given.html is not None:
        _write_simulated_page(given.html, model, found, given.dtype, wishes, points)
    if given.json:
        _print(json.dumps([point.model_dump(mode="json", exclude={"plan"}) for point in points], indent=2))
    else:
        Console().print(report.simulation_table(points))


def _doublings(devices: int) -> list[int]:
    """1, 2, 4 and so on, and all of them."""
    powers = [1 << exponent for exponent in range(devices.bit_length())]
    return sorted({*powers, devices})


def _write_simulated_page(
    path: str,
    model: ModelDescription,
    found: hardware.Hardware,
    dtype: str,
    wishes: Wishes,
    points: Sequence[SimulatedPoint],
) -> None:
    """Of the largest number of devices that fits. Raises InfeasibleError where none does."""
    fitting = [point for point in points if point.plan is not None]
    if not fitting:
        least = min(points, key=lambda point: point.needed_bytes)
        raise InfeasibleError(
            f"no page: nothing fits, {least.devices} devices need {format_bytes(least.needed_bytes)} each",
            needed_bytes=least.needed_bytes,
            budget_bytes=least.memory_limit_bytes,
        )
    largest = max(fitting, key=lambda point: point.devices)
    assert largest.plan is not None
    problem = problem_on(model, found, largest.devices, largest.memory_limit_bytes, dtype, wishes)
    _write_page(path, largest.plan, way_of(largest.plan, problem), points)


def _write_page(path: str, plan: ExecutionPlan, problem: Problem | None, points: Sequence[SimulatedPoint] = ()) -> None:
    from lightning_osdp import pictures  # needs matplotlib, which is an extra

    model = problem.model if problem is not None else None
    bought = tradeoff(problem, plan.batch_size, plan.accumulate_grad_batches, PAGE_LIMITS) if problem else ()
    _write(path, pictures.html(plan, model=model, tradeoff=bought, points=points))


# -- consolidate -------------------------------------------------------------------------------------------------------


def _consolidate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=str, help="a checkpoint saved with save_format='sharded'")
    parser.add_argument("file", type=str, help="the ordinary checkpoint to write")
    parser.add_argument(
        "--trusted", action="store_true", help="let the folder hold any Python object, which may run code"
    )


def _consolidate(given: Namespace) -> None:
    checkpoint.consolidate(Path(given.folder), Path(given.file), weights_only=not given.trusted)
    size = Path(given.file).stat().st_size
    facts = {"file": given.file, "bytes": size}
    _print(json.dumps(facts, indent=2) if given.json else f"{given.file}: {format_bytes(size)}")


COMMANDS = {
    "profile": Command("Measure the links between this machine's devices.", _profile_arguments, _profile),
    "plan": Command("Plan what a LightningCLI configuration trains.", _plan_arguments, _plan),
    "explain": Command("Say why a plan is what it is.", _explain_arguments, _explain),
    "diff": Command("Say how two plans differ.", _diff_arguments, _diff),
    "consolidate": Command("Make one ordinary checkpoint of a sharded one.", _consolidate_arguments, _consolidate),
    "simulate": Command("Plan for hardware that is not here.", _simulate_arguments, _simulate),
}
"""Every command by its name; a further one is a row here and its two functions."""


if __name__ == "__main__":
    sys.exit(main())
