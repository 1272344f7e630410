"""Small models whose operators may be tensor parallel, and problems of them."""

from __future__ import annotations

from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.tensor import TensorCandidate, TensorRole
from tests.support.small_models import MIB, blocks_of_two, cluster, compute

FREE = SearchConstraints(activation_checkpointing=False)


def mlp(
    scope: str, input_mib: float = 0.25, degrees: tuple[int, ...] = (2, 4), output_mib: float | None = None
) -> TensorCandidate:
    """The operators of a block of ``blocks_of_two``; what they give is as large as what they take if not said."""
    return TensorCandidate(
        operators=(f"{scope}.up", f"{scope}.down"),
        roles=(TensorRole.COLUMN, TensorRole.ROW),
        scope=scope,
        attributes=(f"{scope}.width",),
        degrees=degrees,
        input_bytes=input_mib * MIB,
        output_bytes=(input_mib if output_mib is None else output_mib) * MIB,
    )


def model_of(count: int = 2, input_mib: float = 0.25, saved_mib: int = 2) -> ModelProfile:
    """Blocks of two operators, 4 and 8 MiB with Adam, which are the MLP of a scope of their own."""
    model = blocks_of_two(count, saved_mib)
    candidates = [mlp(f"blocks.{index}", input_mib) for index in range(count)]
    return model.with_tensor_candidates(candidates, {"head": "its forward is hooked"})


def problem_of(
    model: ModelProfile | None = None, limit_mib: float = 1 << 12, constraints: SearchConstraints = FREE, **times: float
) -> Problem:
    model = model or model_of()
    links = {"latency_ms": times.pop("latency_ms", 0.1)}
    return Problem(model, cluster(**links), compute(model, **times), int(limit_mib * MIB), constraints=constraints)
