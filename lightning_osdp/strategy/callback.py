"""OSDPCallback: constrains the search before planning, and logs predicted and measured figures while training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from typing_extensions import override

from lightning_osdp.errors import ConfigurationError, OSDPError, OSDPWarning
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state.checkpoint import read_checkpoint
from lightning_osdp.strategy.checkpointing import local_path
from lightning_osdp.strategy.osdp import OSDPStrategy

LOG_PREFIX = "osdp/"
"""Prefix of every logged name."""


class OSDPCallback(Callback):
    """A callback that limits what the search decides, and logs how the plan's predictions hold.

    Every ``trainer.log_every_n_steps`` steps it logs, through the trainer's loggers, ``osdp/step_time_s``,
    ``osdp/samples_per_s``, ``osdp/peak_memory_bytes`` (of rank 0), each with its ``osdp/predicted_...``, and
    ``osdp/mfu`` (model FLOPs utilisation: FLOPs of the model without recomputation over the device's peak) where
    Lightning knows the device. The plan is stored in checkpoints, and used again when a run resumes on the same kind of
    cluster; on another one a new plan is made for the same weights.

    Args:
        slice_granularity: ``"auto"`` (each operator is whole, or in 2, 4, 8 or 16 slices, whatever is fastest within
            the memory limit), a number of slices for every operator that can be split (1: none is), or numbers by
            pattern.
        activation_checkpointing: ``"auto"`` (a repeated block is recomputed where that is faster than what it would
            take otherwise to fit), True (every block), False (none), or patterns of the blocks to recompute.
            Patterns are dotted prefixes (``model.blocks.3``) or globs (``*.mlp.*``) of module names.
        modes: ``"auto"``, one mode for every operator (``"dp"``: replicated, ``"zdp2"``: sharded and gathered once a
            step, ``"zdp"``: sharded and gathered twice), or modes by pattern, the first that matches. An operator
            that can't be sharded that far takes the next weaker mode, and ``osdp explain`` says why. ``"tp"`` is tensor
            parallel, over as many ranks as is fastest; an operator that can't be is left to the search.
        tensor_parallel: ``"auto"`` (operators are tensor parallel where that is fastest: each rank keeps a slice of
            the weights, and activations are exchanged), False (none is), or numbers of ranks by pattern, each a divisor
            of the devices of a node; 1 for not at all. An MLP or an attention is tensor parallel as a whole.
        progress_bar: whether throughput and peak memory are shown in the progress bar.

    Raises:
        ConfigurationError: an argument can't be used; at ``setup``: the strategy is not OSDPStrategy, or there is
            another OSDPCallback; when planning: a pattern matches nothing, or nothing that can have its mode.
    """

    def __init__(
        self,
        slice_granularity: Literal["auto"] | int | dict[str, int] = "auto",
        activation_checkpointing: Literal["auto"] | bool | list[str] = "auto",
        progress_bar: bool = True,
        modes: str | dict[str, str] = "auto",
        tensor_parallel: Literal["auto"] | bool | dict[str, int] = "auto",
    ) -> None:
        patterns = activation_checkpointing
        self.constraints = SearchConstraints(
            slice_granularity,
            tuple(patterns) if isinstance(patterns, list) else patterns,
            modes=modes,
            tensor_parallel=tensor_parallel,
        )
        self._progress_bar = progress_bar
        self._strategy: OSDPStrategy | None = None
        self._peak_flops: float | None = None

    @property
    @override
    def state_key(self) -> str:
        """Key of this callback's state; it holds the arguments, so that ``setup`` can refuse a second callback."""
        later = ("modes", "tensor_parallel")  # checkpoints of before these could be given have a key without them
        return self._generate_state_key(
            slice_granularity=self.constraints.slice_granularity,
            activation_checkpointing=self.constraints.activation_checkpointing,
            **{name: value for name in later if (value := getattr(self.constraints, name)) != "auto"},
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hand the constraints, and the plan of the checkpoint to resume from, to the strategy."""
        find_own_callback(trainer)
        if not isinstance(trainer.strategy, OSDPStrategy):
            raise ConfigurationError(
                f"OSDPCallback needs OSDPStrategy, the Trainer has {type(trainer.strategy).__name__}: build it as "
                "Trainer(strategy='osdp')"
            )
        self._strategy = trainer.strategy
        if stage == "fit":
            self._strategy.constraints = self.constraints
            self._strategy.resumed_plan = self._load_plan_from_checkpoint(
                *self._strategy.resume_checkpoint_path(trainer)
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look up the peak FLOPs of the device."""
        self._peak_flops = _device_peak_flops(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log every ``log_every_n_steps`` optimizer steps."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.barebones or not every or (trainer.global_step % every and not trainer.is_last_batch):
            return
        metrics = self._collect_metrics()
        if not metrics:
            return
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if self._progress_bar:
            shown = {
                "osdp_samples_per_s": metrics[f"{LOG_PREFIX}samples_per_s"],
                "osdp_peak_GiB": metrics[f"{LOG_PREFIX}peak_memory_bytes"] / (1 << 30),
            }
            pl_module.log_dict(shown, prog_bar=True, logger=False, batch_size=1)

    def _collect_metrics(self) -> dict[str, float]:
        """Return measured and predicted figures; empty until enough steps were made."""
        assert self._strategy is not None
        plan, measured = self._strategy.execution_plan, self._strategy.measured_step
        if plan is None or measured is None:
            return {}
        predicted = plan.predicted
        metrics = {
            "step_time_s": measured.step_time_s,
            "predicted_step_time_s": predicted.step_time_s,
            "samples_per_s": plan.global_batch_size / measured.step_time_s,
            "predicted_samples_per_s": predicted.samples_per_s,
            "peak_memory_bytes": float(measured.peak_memory_bytes),
            "predicted_peak_memory_bytes": float(predicted.peak_memory_bytes),
        }
        if self._peak_flops and plan.model.flops_per_sample:
            flops = plan.model.flops_per_sample * plan.batch_size * plan.accumulate_grad_batches
            metrics["mfu"] = flops / measured.step_time_s / self._peak_flops
        return {LOG_PREFIX + name: value for name, value in metrics.items()}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the plan in use as JSON text, and the constraints that it was made with."""
        if self._strategy is None or self._strategy.execution_plan is None:
            return {}
        return {"plan": self._strategy.execution_plan.to_json(), "constraints": repr(self._strategy.search_constraints)}

    def _load_plan_from_checkpoint(self, checkpoint: str | None, weights_only: bool | None) -> ExecutionPlan | None:
        """Return the plan that an OSDPCallback with the same constraints stored in a checkpoint; None if there is none.

        A checkpoint that can't be read is a warning here: the run makes a new plan, and loading the checkpoint itself
        later reports what is wrong with it.
        """
        if checkpoint is None:
            return None
        assert self._strategy is not None
        try:
            states = read_checkpoint(local_path(checkpoint), weights_only).get("callbacks", {})
            ours = states.get(self.state_key, {}) if isinstance(states, dict) else {}
            if "plan" not in ours or ours.get("constraints") != repr(self._strategy.search_constraints):
                return None
            return ExecutionPlan.from_json(ours["plan"], source=f"the plan in {checkpoint}")
        except (OSDPError, TypeError, AttributeError) as error:
            text = f"a new plan is made: the one in {checkpoint} can't be read ({error})"
            warnings.warn(text, OSDPWarning, stacklevel=2)
            return None


def find_own_callback(trainer: pl.Trainer) -> OSDPCallback | None:
    """Return the Trainer's OSDPCallback; None if it has none.

    Raises:
        ConfigurationError: it has several.
    """
    callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = [callback for callback in callbacks if isinstance(callback, OSDPCallback)]
    if len(found) > 1:
        raise ConfigurationError(f"the Trainer has {len(found)} OSDPCallbacks: give their arguments to one")
    return found[0] if found else None


def _device_peak_flops(trainer: pl.Trainer) -> float | None:
    """FLOP/s that the device could reach in the precision that matrix products run in; None where that is unknown."""
    precision = trainer.strategy.precision_plugin
    dtype = torch.float32
    if isinstance(precision, MixedPrecision):
        dtype = torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown device is no reason to worry: MFU is just not logged
        found = get_available_flops(trainer.strategy.root_device, dtype)
    return float(found) if found else None
