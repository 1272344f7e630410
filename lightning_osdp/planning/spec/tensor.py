"""Tensor parallelism: operators that stay cut over a few ranks, which exchange activations instead of weights.

The N ranks form groups of t consecutive ones. Each rank of a group holds one slice of the operator's weights, and runs
it for the samples of the whole group. Ranks of different groups that hold the same slice average its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from lightning_osdp.planning.spec.frozen import Count, FrozenModel, NonNegative, TextEnum

Degree = Annotated[int, Field(ge=2, le=1 << 20)]
"""Number of ranks that hold one slice each, t."""


class TensorRole(TextEnum):
    """How an operator is cut."""

    EMBEDDING = "embedding"
    """The columns of its table: indices are gathered, looked-up values exchanged."""
    TABLE_ROWS = "table_rows"
    """The rows of its table: indices are gathered, partial values, of the rows that a rank has, are summed and
    scattered."""
    LINEAR = "linear"
    """Its output features: the input is gathered, outputs are exchanged."""
    COLUMN = "column"
    """First of a scope, its output features: the input is gathered, outputs stay where they are."""
    ROW = "row"
    """Last of a scope, its input features: partial outputs are summed and scattered."""
    ATTENTION = "attention"
    """The heads of an ``nn.MultiheadAttention``: its input is gathered, partial outputs are summed and scattered."""

    @property
    def has_scope(self) -> bool:
        """Return whether the operator is run together with others of a module."""
        return self in (TensorRole.COLUMN, TensorRole.ROW)

    @property
    def is_table(self) -> bool:
        """Return whether rows of the weight are looked up, not multiplied with."""
        return self in (TensorRole.EMBEDDING, TensorRole.TABLE_ROWS)


class TensorSplit(FrozenModel):
    """What a plan says about one operator that is tensor parallel."""

    degree: Degree
    role: TensorRole
    scope: str | None = None
    """Module in which column and row operators run together (an MLP, an attention); None for the other roles."""
    parts: Count = 1
    """Equal parts of a fused projection (query, key and value), each of which is cut."""

    @model_validator(mode="after")
    def _check_scope(self) -> TensorSplit:
        if self.role.has_scope != (self.scope is not None):
            needs = "needs a scope" if self.role.has_scope else f"has no scope, but says {self.scope!r}"
            raise ValueError(f"scope: the role {self.role.value} {needs}")
        return self


class TensorScope(FrozenModel):
    """What a module needs while its operators run tensor parallel."""

    attributes: tuple[str, ...] = ()
    """Whole numbers of modules in it that are divided by the degree while it runs: ``h.0.attn.num_heads``."""
    needs_agreement: bool = False
    """Whether it takes arguments (masks) that the ranks of a group must have alike."""
    inner_modules: tuple[str, ...] = ()
    """Modules that run between its operators, which see a slice of what they are given."""
    functions: tuple[str, ...] | None = None
    """Functions of torch that were seen there, by name; None if it is not known."""


class TensorCandidate(FrozenModel):
    """Operators that may be tensor parallel, all of them or none, as tracing has found and proven."""

    operators: tuple[str, ...] = Field(min_length=1)
    """Names of the operators; a scope has column operators and one or more row operators."""
    roles: tuple[TensorRole, ...]
    parts: tuple[Count, ...] = ()
    """``TensorSplit.parts`` of each operator; empty if it is 1 for all."""
    scope: str | None = None
    """Module that runs as a whole between the exchanges; None for a single embedding or linear operator."""
    attributes: tuple[str, ...] = ()
    needs_agreement: bool = False
    inner_modules: tuple[str, ...] = ()
    functions: tuple[str, ...] | None = None
    degrees: tuple[Degree, ...] = Field(min_length=1)
    """Numbers of ranks for which it was proven."""
    input_bytes: NonNegative
    """Bytes per sample of what is gathered: the input of the column operators, or the indices of an embedding."""
    output_bytes: NonNegative
    """Bytes per sample of the output that is exchanged, or summed and scattered."""

    @model_validator(mode="after")
    def _check_operators(self) -> TensorCandidate:
        count = len(self.operators)
        if len(self.roles) != count or len(self.parts) not in (0, count):
            raise ValueError(f"{count} operators need as many roles and parts")
        if (self.scope is None and count > 1) or any(role.has_scope != (self.scope is not None) for role in self.roles):
            raise ValueError(f"roles {', '.join(self.roles)} contradict the scope {self.scope!r}")
        if self.scope is not None and set(self.roles) != {TensorRole.COLUMN, TensorRole.ROW}:
            raise ValueError(f"scope {self.scope!r} needs operators of both roles, column and row")
        return self

    def split(self, index: int, degree: int) -> TensorSplit:
        """Return what a plan says about one of its operators."""
        parts = self.parts[index] if self.parts else 1
        return TensorSplit(degree=degree, role=self.roles[index], scope=self.scope, parts=parts)

    def splits(self, degree: int) -> dict[str, TensorSplit]:
        """Return what a plan says about each of its operators, by name."""
        return {name: self.split(index, degree) for index, name in enumerate(self.operators)}

    @property
    def tensor_scope(self) -> TensorScope:
        """Return what a plan says about the module in which the operators run together."""
        return TensorScope(
            attributes=self.attributes,
            needs_agreement=self.needs_agreement,
            inner_modules=self.inner_modules,
            functions=self.functions,
        )

    def use(self, index: int) -> TensorUse:
        """Return the part of one of its operators in its costs."""
        role = self.roles[index]
        alike = self.roles.count(role)
        takes_input, gives_output = role != TensorRole.ROW, role != TensorRole.COLUMN
        return TensorUse(
            role=role,
            degrees=self.degrees,
            input_bytes=self.input_bytes / alike if takes_input else 0.0,
            output_bytes=self.output_bytes / alike if gives_output else 0.0,
            share=1 / alike,
            num_operators=len(self.operators),
        )


class TensorUse(FrozenModel):
    """The part of one operator in the costs of its ``TensorCandidate``; those of all its operators add up."""

    role: TensorRole
    degrees: tuple[Degree, ...]
    input_bytes: NonNegative
    """Bytes per sample that are gathered for it; operators that read the same input have equal shares."""
    output_bytes: NonNegative
    """Bytes per sample that are exchanged, or summed and scattered, after it."""
    share: NonNegative = 1.0
    """Its share in the collectives of its role."""
    num_operators: Count = 1
    """Operators that are tensor parallel together."""
    is_required: bool = False
    """Whether the user asks for it."""


def check_splits(splits: Mapping[str, TensorSplit], scopes: Mapping[str, TensorScope], devices: int) -> None:
    """Refuse what operators and scopes of a plan say about tensor parallelism if it is not consistent.

    Args:
        splits: The split of each operator that is tensor parallel, by name.
        scopes: What each scope needs, by name of its module.
        devices: Devices of a node, which hold all slices of an operator.

    Raises:
        ValueError: Names the operator or the scope, and the field.
    """
    for name, split in splits.items():
        if devices % split.degree:
            raise ValueError(f"{name}: tensor.degree {split.degree} does not divide the {devices} devices of a node")
        if split.scope is not None and split.scope not in scopes:
            raise ValueError(f"{name}: tensor.scope {split.scope!r} is not in tensor_scopes")
    for scope in scopes:
        members = {name: split for name, split in splits.items() if split.scope == scope}
        _check_scope_members(scope, members)


def _check_scope_members(scope: str, members: Mapping[str, TensorSplit]) -> None:
    degrees = Counter(split.degree for split in members.values())
    if len(degrees) > 1:
        text = " and ".join(map(str, sorted(degrees)))
        raise ValueError(f"tensor_scopes: operators of {scope!r} differ in tensor.degree: {text}")
    missing = {TensorRole.COLUMN, TensorRole.ROW} - {split.role for split in members.values()}
    if missing:
        roles = " and no ".join(sorted(missing))
        raise ValueError(f"tensor_scopes: {scope!r} has no {roles} operator (tensor.role)")


def index_candidates(candidates: Iterable[TensorCandidate]) -> dict[str, tuple[TensorCandidate, int]]:
    """Return the candidate of each operator, with its position there.

    Raises:
        ValueError: An operator is in two candidates.
    """
    found: dict[str, tuple[TensorCandidate, int]] = {}
    for candidate in candidates:
        for index, name in enumerate(candidate.operators):
            if name in found:
                raise ValueError(f"tensor_candidates: {name} is in two of them")
            found[name] = (candidate, index)
    return found
