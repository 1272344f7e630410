"""Run ``osdp emulate``: train some steps as rank 0 of a cluster that is not there.

Each strategy trains in a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from lightning_osdp.autotune.ranks import device_name
from lightning_osdp.backend.emulated import BACKEND
from lightning_osdp.backend.memory import memory_limit
from lightning_osdp.cli import offline_plan
from lightning_osdp.cli.emulate_worker import StrategyName, StrategyResult, Task
from lightning_osdp.cli.large_modules import ModuleMaker
from lightning_osdp.emulation.environment import describe_cluster, resolve_cluster
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPError, OSDPWarning
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import Baseline
from lightning_osdp.report import tables
from lightning_osdp.strategy import arguments, offline
from lightning_osdp.strategy.planning_options import PlanningOptions

STRATEGIES: tuple[StrategyName, ...] = ("osdp", "ddp", "fsdp", "fsdp2")

UNSHARDED_COPIES = 4
"""Weights, gradients and optimizer states: a larger module can't make a step here, so its values are of no use."""

LARGEST_MADE_BYTES = 1 << 30
"""Of the parameters of a module that is made to be planned: its step takes several times that; a plan needs shapes."""

_FSDP = ("FSDP per block", "FSDP per operator")

BASELINES: dict[str, tuple[str, ...]] = {"ddp": ("DDP",), "fsdp": _FSDP, "fsdp2": _FSDP}
"""The baselines of a plan, of which the first that it has says which batch size suits a strategy best."""

DDP_SETTINGS = (("_set_static_graph", "static_graph"), ("find_unused_parameters", "find_unused_parameters"))
"""Words of an error of DDP that tell which argument a module needs, and that argument."""

WritePage = Callable[[str, ExecutionPlan], None]


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        config: path of the LightningCLI file.
        cluster: the cluster that is not there.
        strategies: what to train under, in this order.
        num_steps: optimizer steps that are timed.
        batch_size: per device, for all strategies; None: the best of each.
        planning_args: arguments of OSDPStrategy.
        global_batch_size: over all ranks, for all strategies; ``"keep"``: that of OSDP's plan.
    """

    config: Path
    cluster: Cluster
    strategies: Sequence[StrategyName]
    num_steps: int
    batch_size: int | None
    planning_args: dict[str, Any]
    global_batch_size: int | str | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    offline_plan.add_arguments(parser, "config", "memory_limit", "global_batch_size", "cache", "html")
    parser.add_argument(
        "--hardware",
        type=str,
        required=True,
        help="a name (h100-80gb-nvlink), or the path of a hardware or cluster file",
    )
    parser.add_argument("--devices", type=int, help="devices in all (default: all that the hardware has)")
    parser.add_argument(
        "--nodes", type=int, help="nodes that the devices are spread over (default: as few as possible)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps that are timed (default: %(default)s)")
    parser.add_argument(
        "--strategy", choices=list(STRATEGIES), default="osdp", help="what to train under (default: %(default)s)"
    )
    parser.add_argument(
        "--compare", action="store_true", help="all strategies in turn, each at its own best batch size"
    )
    parser.add_argument("--plan-only", action="store_true", help="print OSDP's plan and train nothing")
    parser.add_argument("--batch-size", type=int, help="per device, for all strategies (default: the best of each)")
    parser.add_argument("--max-batch-size", type=int, help="the largest batch size that OSDP considers")


def run(options: Namespace, write_page: WritePage) -> None:
    """Run the command.

    Args:
        options: the arguments.
        write_page: writes the page of a plan.

    Raises:
        ConfigurationError: something can't be used.
        InfeasibleError: nothing fits.
    """
    request = _read_request(options)
    if options.html is not None and not options.plan_only and "osdp" not in request.strategies:
        raise ConfigurationError("--html shows OSDP's plan: give --compare, or leave --strategy out")
    if not options.json:
        print(describe_cluster(request.cluster), flush=True)
    if options.plan_only:
        plan, obstacle = _plan(request)
        if options.html is not None:
            write_page(options.html, plan)
        print(plan.to_json()) if options.json else Console().print(tables.plan_table(plan))
        if obstacle:
            print(f"Its steps can't be emulated here: {obstacle}.", file=sys.stderr)
        return
    results = _train_all(request, quiet=options.json)
    plan_or_none = next((result.plan for result in results if result.plan is not None), None)
    if options.html is not None and plan_or_none is not None:
        write_page(options.html, plan_or_none)
    elif options.html is not None:
        warnings.warn(f"{options.html} is not written: OSDP has no plan to show", OSDPWarning, stacklevel=2)
    limit = None if plan_or_none is None else plan_or_none.memory_limit_bytes
    rows = [_to_row(result, request.cluster.ranks, limit) for result in results]
    print(json.dumps(rows, indent=2)) if options.json else Console().print(tables.emulation_table(rows, plan_or_none))
    if all(result.failure for result in results):
        options.json = False  # the error is not written beside the document
        raise _to_error(results[0])


def _read_request(options: Namespace) -> Request:
    for name in ("steps", "batch_size"):
        arguments.validate_positive(name, options[name])
    names = ("memory_limit", "max_batch_size", "global_batch_size", "cache")
    planning_args = {name: options[name] for name in names if options[name] is not None}
    config = offline_plan.load_config(Path(options.config))
    used_args = PlanningOptions(**config.planning_args | planning_args)  # refused here if they can't be used
    return Request(
        config=config.path,
        cluster=resolve_cluster(options.hardware, options.devices, options.nodes),
        strategies=STRATEGIES if options.compare else (options.strategy,),
        num_steps=options.steps,
        batch_size=options.batch_size,
        planning_args=planning_args,
        global_batch_size=used_args.global_batch_size,
    )


def _train_all(request: Request, quiet: bool) -> list[StrategyResult]:
    """Train under each strategy at the best batch size that OSDP's plan knows for it, unless one was given."""
    results: list[StrategyResult] = []
    baselines: dict[str, Baseline] = {}
    for strategy in request.strategies:
        names = BASELINES.get(strategy, ())
        baseline = next((baselines[name] for name in names if name in baselines), None)
        if baseline is not None and not baseline.fits:
            missing = format_bytes(baseline.missing_bytes)
            results.append(StrategyResult(strategy=strategy, failure=f"does not fit: {missing} are missing"))
            continue
        batch_size = request.batch_size or (baseline.batch_size if baseline is not None else None)
        result = _train(request, strategy, batch_size, quiet)
        if result.failure and len(request.strategies) == 1:
            raise _to_error(result)
        if result.plan is not None:
            baselines = {baseline.name: baseline for baseline in result.plan.baselines}
            if request.global_batch_size == "keep":
                request = replace(request, global_batch_size=result.plan.global_batch_size)
        results.append(result)
    return results


def _to_error(result: StrategyResult) -> OSDPError:
    if not result.needed_bytes:
        return ConfigurationError(result.failure)
    return InfeasibleError(result.failure, needed_bytes=result.needed_bytes, budget_bytes=result.budget_bytes)


def _train(request: Request, strategy: StrategyName, batch_size: int | None, quiet: bool) -> StrategyResult:
    """Train under one strategy; again where DDP says which argument it needs for this module."""
    result = _train_once(request, strategy, batch_size, {}, quiet)
    untried = dict(DDP_SETTINGS) if strategy == "ddp" else {}
    while needed := next((words for words in untried if words in result.failure), None):
        result = _train_once(request, strategy, batch_size, {untried.pop(needed): True}, quiet)
    return result


def _train_once(
    request: Request, strategy: StrategyName, batch_size: int | None, settings: dict[str, bool], quiet: bool
) -> StrategyResult:
    """Train under one strategy in a process of its own, which shows what it prints unless ``quiet``."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        task = Task(
            config=str(request.config),
            cluster=request.cluster,
            strategy=strategy,
            num_steps=request.num_steps,
            batch_size=batch_size,
            global_batch_size=request.global_batch_size if isinstance(request.global_batch_size, int) else None,
            settings=settings,
            planning_args=request.planning_args,
            result=str(result),
            parent=os.getpid(),
        )
        command = [sys.executable, "-m", "lightning_osdp.cli.emulate_worker"]
        output = subprocess.DEVNULL if quiet else None
        status = _run_without_ctrl_c(command, task.model_dump_json(), output)
        if not result.is_file():
            how = f"signal {-status}" if status < 0 else f"status {status}"
            killed = " (out of memory?)" if status == -9 else ""
            return StrategyResult(strategy=strategy, failure=f"the process ended with {how}{killed}")
        return StrategyResult.model_validate_json(result.read_text())


def _run_without_ctrl_c(command: list[str], text: str, output: int | None) -> int:
    """Run a process that Ctrl-C does not reach, and kill it when this one is interrupted; return its exit status.

    A terminal sends SIGINT to both. Python and Lightning would print where it reached the other one.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a new process inherits
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        process.communicate(text)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode


def _to_row(result: StrategyResult, ranks: int, limit_bytes: int | None) -> dict[str, Any]:
    """Return what is printed of a result; ``limit_bytes`` is the memory limit of OSDP's plan, if there is one."""
    if result.failure:
        return {"strategy": result.strategy, "error": result.failure}
    row: dict[str, Any] = result.model_dump(exclude={"plan", "failure", "needed_bytes", "budget_bytes"})
    row["samples_per_s"] = result.samples_per_s(ranks)
    if limit_bytes is not None:
        row["over_limit_bytes"] = max(0, result.peak_memory_bytes - limit_bytes)
    if result.plan is not None:
        row["predicted"] = result.plan.predicted.model_dump(mode="json")
    return row


def _plan(request: Request) -> tuple[ExecutionPlan, str]:
    """Plan for the cluster with compute that is measured on this device, without training.

    Returns:
        The plan, and why its steps can't run on this device; empty if they can.
    """
    config = offline_plan.load_config(request.config)
    sys.path[:0] = [str(Path.cwd()), str(request.config.resolve().parent)]
    device = offline.local_device(config.accelerator)
    cluster = request.cluster.model_copy(update={"device": device_name(device), "backend": BACKEND})
    available = memory_limit(device, local_ranks=1)  # no other rank is here to share this machine with
    fixed: dict[str, Any] = {} if request.batch_size is None else {"batch_size": request.batch_size}
    if "memory_limit" not in config.planning_args:
        fixed["memory_limit"] = available
    make_module = ModuleMaker(min(available // UNSHARDED_COPIES, LARGEST_MADE_BYTES), is_for_planning=True)
    config = replace(config, make_module=make_module)
    plan = offline_plan.plan_from_config(config, None, cluster=cluster, **fixed | request.planning_args).plan
    needed, has = format_bytes(plan.predicted.max_memory_bytes), format_bytes(available)
    if plan.predicted.max_memory_bytes > available:
        return plan, f"a rank takes {needed}, this device has {has}"
    if make_module.is_on_meta and 4 * plan.model.num_parameters > available:
        return plan, "the module makes all of its parameters when it is built, not a rank's shards in configure_model"
    return plan, ""
