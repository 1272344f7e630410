"""Builds the profile of a model from recordings of its step, and counts the step's kernels."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_osdp.engine.splittable import matrix_input_dim, split_dims
from lightning_osdp.planning.spec.model import (
    UNATTRIBUTED,
    ComputeDtype,
    LookedUp,
    ModelProfile,
    Operator,
    ParameterInfo,
)
from lightning_osdp.profiling.kernels.kernel import Kernel
from lightning_osdp.profiling.kernels.sliced_kernels import MATMUL_FUNCTIONS, find_matmul
from lightning_osdp.profiling.tracing.moments import AttributedRecording, fit_moments
from lightning_osdp.profiling.tracing.optimizer_step import OptimizerTrace
from lightning_osdp.profiling.tracing.parameter_owners import OwnerScope, find_scopes, named_parameters
from lightning_osdp.profiling.tracing.recorder import Recording
from lightning_osdp.profiling.tracing.repeated_blocks import describe_blocks, find_blocks
from lightning_osdp.profiling.tracing.weight_casts import find_compute_dtypes, leave_out_casts

LOOKUPS = frozenset({torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default})
"""What reads rows of a weight, and nothing of it in backward."""

KernelsByBatchSize = dict[int, tuple[Kernel, ...]]


def build_profile(
    module: nn.Module,
    batch_size: int,
    recordings: Mapping[int, Recording],
    optimizer_trace: OptimizerTrace,
    evaluation_recordings: Mapping[int, Recording],
    device: torch.device,
) -> tuple[ModelProfile, KernelsByBatchSize]:
    """Return the profile of ``module`` and the kernels of its step by batch size.

    Args:
        module: The module whose step was recorded.
        batch_size: Number of samples in the batch that the user's loader gives.
        recordings: The step at one or two batch sizes.
        optimizer_trace: The optimizers' step.
        evaluation_recordings: The forward without gradients at the same batch sizes; empty if it was not recorded.
        device: Where it is trained.
    """
    largest = max(recordings)
    scopes = find_scopes(module, named_parameters(module), recordings[largest], device)
    dtypes = find_compute_dtypes(module, scopes, named_parameters(module), recordings.values())
    leave_out_casts([*recordings.values(), *evaluation_recordings.values()], dtypes)
    steps = {size: AttributedRecording(recording, scopes, dtypes.keys()) for size, recording in recordings.items()}
    evaluations = {size: AttributedRecording(each, scopes) for size, each in evaluation_recordings.items()}
    flops = [0.0] * (len(scopes) + 1)
    for op, owner in zip(steps[largest].ops, steps[largest].owners, strict=True):
        flops[owner] += op.flops
    flops_per_sample = [total / largest for total in flops]
    operators = _build_operators(module, scopes, flops_per_sample, steps[largest], largest, optimizer_trace, dtypes)
    repeated = find_blocks(module, operators, recordings[largest])
    for attributed in steps.values():
        attributed.assign_blocks([block.name for block in repeated])
    op_runs = {size: attributed.op_runs() for size, attributed in steps.items()}
    blocks = describe_blocks(repeated, steps, op_runs)
    profile = ModelProfile(
        fingerprint=fingerprint(module, operators),
        operators=operators,
        moments=fit_moments(op_runs),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        optimizer_step=optimizer_trace.step,
        batch_size=batch_size,
        unattributed_flops_per_sample=flops_per_sample[UNATTRIBUTED],
        blocks=blocks,
        evaluation=fit_moments({size: each.op_runs() for size, each in evaluations.items()}) if evaluations else (),
    )
    index_of = {block.name: index for index, block in enumerate(blocks)}
    profile_blocks = [*(index_of.get(block.name, UNATTRIBUTED) for block in repeated), UNATTRIBUTED]
    return profile, {size: attributed.kernels(profile_blocks) for size, attributed in steps.items()}


def fingerprint(module: nn.Module, operators: Sequence[Operator] = ()) -> str:
    """Return SHA-256 of the parameters' names, shapes, dtypes and trainability, and of the operators' names.

    A parameter of a lazy module has no shape (None) until the module has run.
    """
    tensors = [
        [list(names), None if is_lazy(tensor) else list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for tensor, names in ((parameter.tensor, parameter.names) for parameter in named_parameters(module))
    ]
    text = json.dumps([tensors, [operator.name for operator in operators]], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _build_operators(
    module: nn.Module,
    scopes: Sequence[OwnerScope],
    flops_per_sample: Sequence[float],
    step: AttributedRecording,
    batch_size: int,
    optimizer_trace: OptimizerTrace,
    dtypes: Mapping[int, ComputeDtype],
) -> tuple[Operator, ...]:
    """Describe the module of each scope as an operator, from the step at ``batch_size``.

    Args:
        module: The module.
        scopes: Its operators' scopes.
        flops_per_sample: FLOPs per sample of each scope, and of what is in none.
        step: The recorded step.
        batch_size: Number of samples in it.
        optimizer_trace: The optimizers' step.
        dtypes: Types in which autocast reads parameters (``weight_casts``).
    """
    orders = _gradient_orders(scopes, step.recording.gradients)
    # A product reads no weight either where its input needs no gradient, but another step may need it. Casts that are
    # not gathered as such are autograd's own: so a table that is looked up, and tied to the head, is not read.
    looked_up = {p for op in step.ops if op.func in LOOKUPS for p in op.used_parameters}
    read = step.recording.read_in_backward | step.recording.casts_read_in_backward & set(dtypes)
    read |= {i for scope in scopes for i in scope.parameters} - looked_up - set(dtypes)
    casts = set(step.recording.weight_casts.values())
    rows: dict[int, LookedUp] = {i: "beside products" if i in casts else "alone" for i in looked_up & set(dtypes)}
    parameters = [
        ParameterInfo(
            name=parameter.names[0],
            aliases=parameter.names[1:],
            shape=tuple(parameter.tensor.shape),
            element_bytes=parameter.tensor.element_size(),
            trainable=parameter.tensor.requires_grad,
            optimizer_bytes=optimizer_trace.state_bytes[index],
            gradient_order=orders.get(index, 0),
            cast_element_bytes=2 if index in dtypes else 0,
            read_in_backward=index in read,
            looked_up=rows.get(index, ""),
        )
        for index, parameter in enumerate(named_parameters(module))
    ]
    modules = dict(module.named_modules(remove_duplicate=False))
    kernels: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in step.kernels():
        kernels[kernel.operator].append(kernel)
    uses, freed = _count_uses(step.recording), _bytes_freed_after_products(step)
    return tuple(
        Operator(
            name=scope.name,
            kind=type(modules[scope.name]).__name__,
            parameters=tuple(parameters[p] for p in scope.parameters),
            calls=max(1, step.recording.calls[scope.name]) if scope.name else 1,
            replicated_reason=scope.replicated_reason or _optimizer_needs_unsharded_reason(scope, optimizer_trace),
            tied=bool(scope.tied_names),
            compute_dtype=next((dtypes[p] for p in scope.parameters if p in dtypes), ""),
            flops_per_sample=flops_per_sample[index],
            **_split_fields(
                scope, modules[scope.name], kernels[index], step.recording, uses, freed.get(index, set()), batch_size
            ),
        )
        for index, scope in enumerate(scopes)
    )


def _split_fields(
    scope: OwnerScope,
    module: nn.Module,
    kernels: Sequence[Kernel],
    recording: Recording,
    uses: Counter[int],
    freed_bytes: Set[int],
    batch_size: int,
) -> dict[str, Any]:
    """Return the fields of an operator that say how it can be split.

    Args:
        scope: The operator's scope.
        module: Its module.
        kernels: Its kernels.
        recording: The recorded step.
        uses: See ``_count_uses``.
        freed_bytes: See ``_bytes_freed_after_products``.
        batch_size: Number of samples in the step.
    """
    if scope.tied_names:
        return {"unsplittable_reason": f"it holds what operators inside have in common: {scope.tied_names}"}
    dims, reason = split_dims(module)
    calls = max(1, recording.calls[scope.name])
    matmul = find_matmul(kernels, calls)
    if dims and matmul is None:
        dims, reason = (), "its forward does not run exactly one product"
    elif dims and not recording.differentiated_parameters.isdisjoint(scope.parameters):
        dims, reason = (), "its gradient is asked for by itself"
    elif dims and max((uses[p] for p in scope.parameters), default=0) > calls:
        dims, reason = (), "its weight is read beside the product, by a hook perhaps"
    if not dims or matmul is None:
        return {"unsplittable_reason": reason}
    if calls > 1:
        return {"split_dims": dims, "unsplittable_reason": f"it runs {calls} times in a step"}
    input_dim = matrix_input_dim(module)
    return {
        "split_dims": dims,
        "output_dims": tuple(dim for dim in dims if dim != input_dim),
        "input_per_sample": matmul.input_bytes / batch_size,
        "output_per_sample": matmul.output_bytes / batch_size,
        "frees_input": matmul.input_bytes in freed_bytes,
    }


def _bytes_freed_after_products(step: AttributedRecording) -> dict[int, set[int]]:
    """Return the sizes of what the forward has made and each operator's last product in backward frees, by operator."""
    ops, recording = step.ops, step.recording
    made = {storage: op for op, storage, sign in recording.events if sign > 0}
    freed: dict[int, set[int]] = defaultdict(set)
    for op, storage, sign in recording.events:
        if sign < 0 and made[storage] >= 0 and ops[made[storage]].phase == "forward":
            freed[op].add(recording.storage_bytes[storage])
    products = {
        owner: index
        for index, (op, owner) in enumerate(zip(ops, step.owners, strict=True))
        if op.phase == "backward" and op.func in MATMUL_FUNCTIONS
    }
    found: dict[int, set[int]] = {}
    for owner, product in products.items():
        stop = next((i for i in range(product, len(ops)) if ops[i].node != ops[product].node), len(ops))
        found[owner] = {size for op in range(product, stop) for size in freed.get(op, ())}
    return found


def _count_uses(recording: Recording) -> Counter[int]:
    """Return how often the forward reads each parameter."""
    forward = (op for op in recording.ops if op.phase == "forward" and not op.is_view)
    return Counter(parameter for op in forward for parameter in set(op.used_parameters))


def _optimizer_needs_unsharded_reason(scope: OwnerScope, optimizer_trace: OptimizerTrace) -> str:
    """Say to the user why the operator's optimizer can't work on parts; empty if it can."""
    mixing = sorted({optimizer_trace.needs_unsharded[parameter] for parameter in scope.parameters} - {""})
    return f"its optimizer ({', '.join(mixing)}) looks at whole tensors" if mixing else ""


def _gradient_orders(scopes: Sequence[OwnerScope], gradients: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return ``ParameterInfo.gradient_order`` by parameter: a new turn begins once all so far are complete."""
    orders: dict[int, int] = {}
    for scope in scopes:
        turn, turn_end = -1, -1
        for begin, end, index in sorted((*gradients[p], p) for p in scope.parameters if p in gradients):
            turn += begin > turn_end
            turn_end = max(turn_end, end)
            orders[index] = turn
    return orders
