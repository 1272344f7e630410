"""Which operators may be tensor parallel at all, and what the module itself says about it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import takewhile

from torch import Tensor, nn

from lightning_osdp.engine.splittable import matrix_input_dim
from lightning_osdp.engine.tensor_parallel.attention import AttentionCall
from lightning_osdp.engine.tensor_parallel.check import has_hooks, tensor_refusal
from lightning_osdp.engine.tensor_parallel.operator import cut_dim
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.tensor import TensorRole
from lightning_osdp.profiling.tracing.dataflow import Call


def refusal(operator: Operator, module: nn.Module, differentiated_twice: Container[str] = ()) -> str:
    """Say to the user why the operator can't be tensor parallel, whatever its size; empty if it can.

    Args:
        operator: the operator.
        module: its module.
        differentiated_twice: names of parameters that gradients depend on which are differentiated again.
    """
    if operator.replicated_reason:
        return operator.replicated_reason
    if any(parameter.name in differentiated_twice for parameter in operator.parameters):
        return "a gradient that depends on it is differentiated again"
    if reason := tensor_refusal(module, role_of(module)):
        return reason
    if has_hooks(module):
        return "there are hooks on it, which may read its weight"
    aliases = [alias for parameter in operator.parameters for alias in parameter.aliases]
    if outside := next((alias for alias in aliases if not alias.startswith(f"{operator.name}.")), ""):
        return f"its weight is also {outside}"
    own, present = {parameter.name for parameter in operator.parameters}, module.named_parameters(operator.name)
    if other := next((name for name, _ in present if name not in own | set(aliases)), ""):
        return f"{other} is used outside of it as well"
    if isinstance(module, nn.EmbeddingBag | nn.MultiheadAttention) or operator.split_dims:
        return ""
    return operator.unsplittable_reason or "it is not a matrix"


def role_of(module: nn.Module, degrees: Sequence[int] = ()) -> TensorRole:
    """Return how a module is cut if it is tensor parallel by itself, over one of some numbers of ranks.

    A table is cut along its columns where it can be: along its rows, what is exchanged is as much for each rank.
    """
    if isinstance(module, nn.MultiheadAttention):
        return TensorRole.ATTENTION
    if isinstance(module, nn.Embedding) and not any(module.embedding_dim % degree == 0 for degree in degrees):
        has_rows = any(module.num_embeddings % degree == 0 for degree in degrees)
        return TensorRole.TABLE_ROWS if has_rows else TensorRole.EMBEDDING
    return TensorRole.EMBEDDING if isinstance(module, nn.Embedding | nn.EmbeddingBag) else TensorRole.LINEAR


def call_refusal(module: nn.Module, calls: Iterable[Call]) -> str:
    """Say to the user why the operator can't be tensor parallel in the way it is called; empty if it can."""
    if not isinstance(module, nn.MultiheadAttention):
        return ""
    reasons = (AttentionCall(*call.args, **call.kwargs).refusal(module) for call in calls)
    return next((reason for reason in reasons if reason), "")


def explain_unknown_dataflow(operators: Sequence[Operator], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Say why operators of a kind that can be tensor parallel are not, where the step could not be followed."""
    refusals = {each.name: refusal(each, modules[each.name]) for each in operators}
    return {
        name: reason or "the training step can't be followed on fake tensors"
        for name, reason in refusals.items()
        if has_tensor_kind(modules[name])
    }


def has_tensor_kind(module: nn.Module) -> bool:
    """Return whether a module is of a kind of which some are tensor parallel, or looks like it."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.MultiheadAttention) or is_linear(module)


def size_refusal(module: nn.Module, degrees: Sequence[int]) -> str:
    """Say to the user why the operator can't be cut by itself over any number of ranks; empty if it can."""
    role, numbers = role_of(module, degrees), " or ".join(map(str, degrees))
    size = cut_size(module, role)
    is_divisible = any(size % degree == 0 for degree in degrees)
    what = {TensorRole.LINEAR: "output features", TensorRole.ATTENTION: "heads"}.get(role, "columns")
    return "" if is_divisible else f"its {size} {what} can't be divided by {numbers}"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear or a Conv1D of transformers."""
    return matrix_input_dim(module) is not None


def cut_size(module: nn.Module, role: TensorRole) -> int:
    """Return the size of what is cut if the module is tensor parallel by itself."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.num_heads)
    assert isinstance(module.weight, Tensor)
    return int(module.weight.shape[cut_dim(module, role)])


def count_heads(module: nn.Module) -> dict[str, int]:
    """Return the numbers of heads of an attention, as its attributes say, to explain why they can't be divided."""
    found = {name: value for each in module.modules() for name, value in vars(each).items() if "head" in name}
    return {name: value for name, value in found.items() if type(value) is int and value > 1 and "dim" not in name}


def describe_refused_groups(refused: Mapping[tuple[str, ...], str], accepted: Container[str]) -> dict[str, str]:
    """Say of each operator with which others it can't be tensor parallel, and why.

    Args:
        refused: Reasons by the names of what would run together.
        accepted: Operators that are tensor parallel together with others.
    """
    found: dict[str, tuple[int, str]] = {}
    for names, reason in refused.items():
        paths = [name.split(".") for name in names]
        blocks = {tuple(part for part in path[:-1] if part.isdecimal()) for path in paths}
        if not reason or len(blocks) > 1 or any(name in accepted for name in names):
            continue  # that one block's output feeds the next one is no MLP
        depth = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False)))
        for path, name in zip(paths, names, strict=True):
            others = [".".join(other[min(depth, len(other) - 1) :]) for other in paths if other is not path]
            text = f"together with {', '.join(others)}: {reason}"
            found[name] = max(found.get(name, (-1, "")), (depth, text), key=lambda each: each[0])
    return {name: text for name, (_, text) in found.items()}


def planned_columns(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the modules that transformers' own plans (``_tp_plan``) cut by columns: a hint, which proves nothing."""
    planned = set()
    for prefix, module in modules.items():
        plan = getattr(module, "_tp_plan", None)
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            if "colwise" in str(style):
                wanted = f"{prefix}.{pattern}".strip(".").split(".")
                planned |= {name for name in modules if _matches(name.split("."), wanted)}
    return planned


def _matches(path: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(path) == len(wanted) and all(b in ("*", a) for a, b in zip(path, wanted, strict=True))
