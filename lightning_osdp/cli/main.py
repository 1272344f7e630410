"""Run ``osdp profile | plan | explain | diff | simulate | emulate | consolidate``, and LightningCLI as ``osdp fit``.

Exit status: 0 done, 1 nothing fits under the memory limit, 2 bad usage or bad input. The standard error stream says
what is wrong, once, whatever the number of ranks; ``--verbose`` adds the traceback. With ``--json`` the standard output
is one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace
from rich.console import Console

from lightning_osdp import __version__
from lightning_osdp.cli import emulate, error_block, fit, measure_links, offline_plan
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPError, OSDPWarning
from lightning_osdp.planning.search.plan_selection import variant_of_plan
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.formatting import format_bytes, format_seconds, parse_memory_limit
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.whatif import hardware
from lightning_osdp.planning.whatif.simulate import SimulatedPoint, simulate_one, sweep_memory_limits
from lightning_osdp.report import diff, explain, tables
from lightning_osdp.state import checkpoint
from lightning_osdp.state.atomic_files import check_text_writable, write_text
from lightning_osdp.strategy import arguments, failure_detector, offline

DONE, INFEASIBLE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

PAGE_MARK = '<meta name="generator" content="osdp">'
"""The mark of our pages (``report.html``)."""

NUM_TRADEOFF_LIMITS = 8
"""Number of memory limits in the figure of time against memory."""


@dataclass(frozen=True)
class Command:
    """A subcommand of ``osdp``.

    Attributes:
        help: its purpose in one line.
        add_arguments: declares its arguments.
        run: runs it; errors are raised.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


def main(args: list[str] | None = None) -> int:
    """Run one command and return the exit status.

    Args:
        args: the arguments after ``osdp``; None for those of the shell.
    """
    words = sys.argv[1:] if args is None else args
    has_traceback = error_block.is_verbose(words)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=OSDPWarning)
            warnings.showwarning = _make_warning_printer(warnings.showwarning)
            status = _run([word for word in words if word not in error_block.VERBOSE_OPTIONS])
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough, as in `osdp explain PLAN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except SystemExit:
        raise
    except BaseException as error:  # a fault of the input, or our own, of any class: status 1 means that nothing fits
        error = error_block.find_output_fault(error) or error
        error_block.print_error(error, has_traceback, is_expected=isinstance(error, OSDPError | ArgumentError))
        return INFEASIBLE if isinstance(error, InfeasibleError) else BAD_INPUT


def _run(words: list[str]) -> int:
    if words and words[0] in fit.SUBCOMMANDS:
        failure_detector.EXIT_STATUS = BAD_INPUT
        fit.run(words)
        return DONE
    try:
        parsed = _build_parser().parse_args(words)
    except SystemExit as exit_:  # raised by --help and --version
        return int(exit_.code or DONE)
    options = parsed[parsed.command]
    try:
        COMMANDS[parsed.command].run(options)
    except InfeasibleError as error:
        if options.json:
            facts = {"needed_bytes": error.needed_bytes, "memory_limit_bytes": error.budget_bytes}
            _print(json.dumps({"feasible": False, **facts, "message": str(error)}, indent=2))
        raise
    return DONE


class _Help(DefaultHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:  # without types and defaults such as null
        return f"{action.help or ''}{' (required)' if action.required and action.option_strings else ''}"


def _build_parser() -> ArgumentParser:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "lightning"))
    parser = ArgumentParser(
        prog="osdp",
        description="Train with the fastest plan that fits the memory, make such a plan, and explain it.",
        version=f"{__version__} ({versions}, Python {platform.python_version()})",
        exit_on_error=False,
        formatter_class=_Help,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, purpose in fit.SUBCOMMANDS.items():  # they have LightningCLI's arguments, which it parses itself
        subcommands.add_subcommand(name, ArgumentParser(), help=purpose)
    for name, command in COMMANDS.items():
        subparser = ArgumentParser(description=command.help, exit_on_error=False, formatter_class=_Help)
        command.add_arguments(subparser)
        subparser.add_argument("--json", action="store_true", help="write JSON instead of text")
        subcommands.add_subcommand(name, subparser, help=command.help)
    return parser


def _make_warning_printer(fallback: Callable[..., None]) -> Callable[..., None]:
    """Print our warnings in one line, without the source line that raised them."""

    def show(message: Any, category: Any, *rest: Any, **named: Any) -> None:
        if issubclass(category, OSDPWarning):
            print(f"osdp: warning: {message}", file=sys.stderr)
        else:
            fallback(message, category, *rest, **named)

    return show


IsOwn = Callable[[str], bool]
"""Tells from the content of a file whether it is of the kind that is to be written, and may be replaced."""


def _is_page(text: str) -> bool:
    return PAGE_MARK in text[:1000]


def _is_cluster(text: str) -> bool:
    try:
        Cluster.from_json(text)
    except (ValueError, RecursionError, OSDPError):
        return False
    return True


def _write(path: str, text: str, is_own: IsOwn) -> None:
    try:
        write_text(Path(path), text + "\n", is_own)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error}") from error


def _check_output(path: str | None, is_own: IsOwn) -> None:
    """Refuse a file that could not be written, before the work is done."""
    if path is not None:
        check_text_writable(Path(path), is_own)


def _check_page(path: str | None) -> None:
    """Refuse a page that could not be written or drawn, before the work is done."""
    _check_output(path, _is_page)
    if path is not None and util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--html draws with matplotlib, which is not installed: pip install 'lightning-osdp[pictures]'"
        )


def _print(text: str) -> None:
    print(text, flush=True)


# -- profile -----------------------------------------------------------------------------------------------------------


def _add_profile_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, required=True, help="number of devices; each gets a process")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is")
    parser.add_argument("--out", type=str, default="cluster.json", help="file to write (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything (default: %(default)s)")


def _profile(options: Namespace) -> None:
    arguments.validate_positive("devices", options.devices)
    _check_output(options.out, _is_cluster)
    kind = offline.default_device_type() if options.accelerator == "auto" else options.accelerator
    cluster = measure_links.measure_cluster(options.devices, kind, options.timeout)
    _write(options.out, cluster.model_dump_json(indent=2), _is_cluster)
    if options.json:
        _print(cluster.model_dump_json(indent=2))
    else:
        _print(f"{cluster.devices_per_node} x {cluster.device} ({cluster.backend}) written to {options.out}")
        _print(_links_text(cluster))


def _links_text(cluster: Cluster) -> str:
    """Show what collectives of 16 MiB take, for a first impression."""
    size = 16 << 20
    times = {name: fit.time_s(size, cluster.ranks) for name, fit in cluster.link}
    return "16 MiB: " + ", ".join(f"{name.replace('_', '-')} {format_seconds(time)}" for name, time in times.items())


# -- plan --------------------------------------------------------------------------------------------------------------


def _add_plan_arguments(parser: ArgumentParser) -> None:
    offline_plan.add_arguments(parser, "config", "memory_limit", "batch_size", "max_batch_size", "global_batch_size")
    offline_plan.add_arguments(parser, "cache", "html")
    parser.add_argument("--cluster", type=str, help="the hardware, as `osdp profile` wrote it")
    parser.add_argument("--devices", type=int, help="per node, instead of the cluster's")
    parser.add_argument(
        "--sharding-group", choices=["auto", "world", "node"], help="ranks that operators are sharded over"
    )
    parser.add_argument("--out", type=str, help="file for the plan, to train with")


def _plan(options: Namespace) -> None:
    _check_output(options.out, ExecutionPlan.is_plan)
    _check_page(options.html)
    if None not in (options.out, options.html) and Path(options.out).resolve() == Path(options.html).resolve():
        raise ConfigurationError(f"--out and --html can't both write {options.out}")
    config = _load_config(options)
    devices = arguments.validate_positive("devices", options.devices)
    result = offline_plan.plan_from_config(
        config, devices, **{name: options[name] for name in offline_plan.PLANNING_ARGS if name in options}
    )
    if options.out is not None:
        _write(options.out, result.plan.to_json(), ExecutionPlan.is_plan)
    if options.html is not None:
        _write_page(options.html, result.plan, result.problem)
    if options.json:
        _print(result.plan.to_json())
        return
    Console().print(tables.plan_table(result.plan, None if result.from_cache else result.profiling_s))


def _load_config(options: Namespace) -> offline_plan.TrainingConfig:
    """Read the configuration, and make Python find modules that lie beside it, as in training."""
    path = Path(options.config)
    config = offline_plan.load_config(path)
    sys.path[:0] = [str(Path.cwd()), str(path.resolve().parent)]
    return config


# -- explain and diff --------------------------------------------------------------------------------------------------


def _add_explain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plan", type=str, help="the plan's JSON file")
    offline_plan.add_arguments(parser, "html")


def _explain(options: Namespace) -> None:
    _check_page(options.html)
    plan = _read_plan(options.plan)
    if options.html is not None:
        _write_page(options.html, plan, problem=None)
    explanation = explain.build_explanation(plan)
    _print(explanation.model_dump_json(indent=2) if options.json else explanation.to_text())


def _add_diff_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("before", type=str, help="a plan's JSON file")
    parser.add_argument("after", type=str, help="another's")


def _diff(options: Namespace) -> None:
    difference = diff.build_difference(_read_plan(options.before), _read_plan(options.after))
    _print(json.dumps(difference.model_dump(), indent=2) if options.json else difference.to_text())


def _read_plan(path: str) -> ExecutionPlan:
    plan = arguments.read_plan(path)
    assert plan is not None
    return plan


# -- simulate ----------------------------------------------------------------------------------------------------------


def _add_simulate_arguments(parser: ArgumentParser) -> None:
    offline_plan.add_arguments(parser, "config", "memory_limit", "batch_size", "max_batch_size", "global_batch_size")
    parser.add_argument("--hardware", type=str, required=True, help="a name, such as h100-80gb-nvlink, or a JSON file")
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of devices (default: 1, 2, 4, ... all)")
    parser.add_argument(
        "--dtype", type=str, help="of matrix products, such as bf16 (default: that of the file's precision)"
    )
    parser.add_argument("--html", type=str, help="file for a page with pictures of the largest number that fits")


def _simulate(options: Namespace) -> None:
    _check_page(options.html)
    hardware_spec = hardware.load(options.hardware)
    limit_bytes, share = parse_memory_limit("auto" if options.memory_limit is None else options.memory_limit)
    limit_bytes = limit_bytes or hardware_spec.usable_bytes(share)
    powers = (1 << exponent for exponent in range(hardware_spec.devices.bit_length()))
    devices = options.devices or sorted({*powers, hardware_spec.devices})
    for count in devices:
        hardware.build_cluster(hardware_spec, count)  # refused here, before the step is traced
    if options.dtype is not None:
        hardware_spec.get_peak_flops(options.dtype)
    config = _load_config(options)
    run = offline_plan.profile_from_config(config, **{name: options[name] for name in offline_plan.BATCH_SIZE_ARGS})
    dtype = options.dtype or run.matmul_dtype(config.trainer.get("precision"), hardware_spec)
    problems = {count: run.problem_on(hardware_spec, count, limit_bytes, dtype) for count in devices}
    points = [simulate_one(problem, run.policy(count)) for count, problem in problems.items()]
    if options.json:
        _print(json.dumps([point.model_dump(mode="json", exclude={"plan"}) for point in points], indent=2))
    else:
        Console().print(tables.simulation_table(points))
        if len(points) == 1 and points[0].plan is not None:
            Console().print("", tables.baseline_table(points[0].plan), sep="\n")
    options.json = False  # an error is not written beside the document
    fitting = [point for point in points if point.plan is not None]
    if not fitting:
        raise _nothing_fits(points)
    if options.html is not None:
        largest = max(fitting, key=lambda point: point.devices)
        assert largest.plan is not None
        _write_page(options.html, largest.plan, variant_of_plan(largest.plan, problems[largest.devices]), points)


def _nothing_fits(points: Sequence[SimulatedPoint]) -> InfeasibleError:
    smallest = min(points, key=lambda point: point.needed_bytes)
    needed, limit = smallest.needed_bytes, smallest.memory_limit_bytes
    return InfeasibleError(
        f"nothing fits: {smallest.devices} device{'s' * (smallest.devices > 1)} need {format_bytes(needed)} each, and "
        f"the limit is {format_bytes(limit)}. Use more devices, or raise --memory-limit",
        needed_bytes=needed,
        budget_bytes=limit,
    )


def _write_page(path: str, plan: ExecutionPlan, problem: Problem | None, points: Sequence[SimulatedPoint] = ()) -> None:
    from lightning_osdp.report.html import render_page  # needs matplotlib, which is an extra

    shown: dict[str, Any] = {}
    if problem is not None:
        size = (plan.batch_size, plan.accumulate_grad_batches)
        shown = {"model": problem.model, "tradeoff": sweep_memory_limits(problem, *size, NUM_TRADEOFF_LIMITS)}
    _write(path, render_page(plan, points=points, **shown), _is_page)


# -- emulate -----------------------------------------------------------------------------------------------------------


def _emulate(options: Namespace) -> None:
    _check_page(options.html)
    emulate.run(options, lambda path, plan: _write_page(path, plan, None))


# -- consolidate -------------------------------------------------------------------------------------------------------


def _add_consolidate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=str, help="a checkpoint saved with save_format='sharded'")
    parser.add_argument("file", type=str, help="the ordinary checkpoint to write")
    parser.add_argument(
        "--trusted", action="store_true", help="let the folder hold any Python object, which may run code"
    )


def _consolidate(options: Namespace) -> None:
    checkpoint.consolidate(Path(options.folder), Path(options.file), weights_only=not options.trusted)
    size = Path(options.file).stat().st_size
    facts = {"file": options.file, "bytes": size}
    _print(json.dumps(facts, indent=2) if options.json else f"{options.file}: {format_bytes(size)}")


COMMANDS = {
    "profile": Command(
        "Measure the links between this machine's devices, for osdp plan.", _add_profile_arguments, _profile
    ),
    "plan": Command("Plan what a LightningCLI configuration trains, on measured hardware.", _add_plan_arguments, _plan),
    "explain": Command("Say why a plan is what it is.", _add_explain_arguments, _explain),
    "diff": Command("Say how two plans differ.", _add_diff_arguments, _diff),
    "consolidate": Command("Make one ordinary checkpoint of a sharded one.", _add_consolidate_arguments, _consolidate),
    "simulate": Command(
        "Estimate plans for described hardware, such as eight H100.", _add_simulate_arguments, _simulate
    ),
    "emulate": Command("Train some steps as rank 0 of a cluster that is not here.", emulate.add_arguments, _emulate),
}
"""Commands by name; another one is a row here and two functions."""


if __name__ == "__main__":
    sys.exit(main())
