"""What the user decides instead of the search: modes, slices, sharding group, recomputed blocks.

A pattern matches a name if it is a dotted prefix of it (``model.blocks.3`` for everything in that block), or a glob
that fits the whole name (``*.mlp.*``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.choices import (
    WEIGHT_MODES,
    Mode,
    ShardingScope,
    available_scopes,
    devices_of_each_node,
    legal_modes,
    tensor_degrees,
)
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import ModelProfile, Operator
from lightning_osdp.planning.spec.tensor import TensorCandidate, TensorUse

SHARDING_GROUPS = ("auto", "world", "node")
"""Values that ``sharding_group`` may have."""

MAX_SUGGESTIONS = 5
"""How many names an error suggests."""


@dataclass(frozen=True)
class SearchConstraints:
    """Decisions of the user; ``"auto"`` leaves a decision to the search.

    Attributes:
        slice_granularity: Number of slices of each operator that can be split and is sharded, 1 for unsplit; or such
            numbers by pattern of operator names. The first pattern that matches counts; operators without one are left
            to the search.
        activation_checkpointing: Whether blocks are recomputed: all that can be (True), none (False), or only those
            that match one of these patterns.
        sharding_group: The ranks that operators are sharded over: all of them, in one stage or two (``"world"``), or
            those of each node (``"node"``).
        update_in_backward: Whether sharded parameters may be updated in the backward pass if that is faster.
        modes: Mode of every operator, or modes by pattern of operator names, of which the first that matches counts.
            An operator that can't take its mode takes the next weaker one: ``zdp2`` for ``zdp``, then ``dp``. One that
            can't be ``tp`` is left to the search.
        tensor_parallel: Whether operators may be tensor parallel (False: none), or over how many ranks by pattern of
            operator names, 1 for not at all. Operators without a pattern are left to the search. What runs together (an
            MLP) is tensor parallel together, if a pattern matches one of its operators.
        capabilities: What the engine can carry out; not a decision of the user.

    Raises:
        ConfigurationError: A value has another form.
    """

    slice_granularity: Literal["auto"] | int | Mapping[str, int] = "auto"
    activation_checkpointing: Literal["auto"] | bool | Sequence[str] = "auto"
    sharding_group: str = "auto"
    update_in_backward: bool = False
    modes: Literal["auto"] | str | Mapping[str, str] = "auto"
    tensor_parallel: Literal["auto"] | bool | Mapping[str, int] = "auto"
    capabilities: EngineCapabilities = ALL_CAPABILITIES

    def __post_init__(self) -> None:
        if self.sharding_group not in SHARDING_GROUPS:
            names = " or ".join(map(repr, SHARDING_GROUPS))
            raise ConfigurationError(f"sharding_group has to be {names}, not {self.sharding_group!r}")
        slices = self.slice_granularity
        counts = slices.values() if isinstance(slices, Mapping) else [1 if slices == "auto" else slices]
        is_number = all(type(count) is int and count > 0 for count in counts)
        if not is_number or not _are_patterns(slices):
            raise ConfigurationError(
                "slice_granularity has to be 'auto', a whole number from 1 on, or such numbers by pattern of "
                f"operator names, not {slices!r}"
            )
        if any(mode not in tuple(Mode) for mode in self._modes_by_pattern.values()) or not _are_patterns(self.modes):
            names = ", ".join(repr(mode.value) for mode in Mode)
            raise ConfigurationError(
                f"modes has to be 'auto', one of {names}, or such modes by pattern of operators, not {self.modes!r}"
            )
        self._check_degrees()
        recompute = self.activation_checkpointing
        if recompute == "auto" or isinstance(recompute, bool):
            return
        is_list = isinstance(recompute, Sequence) and not isinstance(recompute, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in recompute):
            raise ConfigurationError(
                "activation_checkpointing has to be 'auto', True, False, or patterns of the names of blocks, not "
                f"{recompute!r}"
            )

    def _check_degrees(self) -> None:
        degrees = self.tensor_parallel
        is_word = degrees is False or (isinstance(degrees, str) and degrees == "auto")
        pairs = degrees.items() if isinstance(degrees, Mapping) else [("*", 1 if is_word else 0)]
        if not all(type(count) is int and count > 0 for _, count in pairs) or not _are_patterns(degrees):
            raise ConfigurationError(
                "tensor_parallel has to be 'auto', False, or whole numbers of ranks from 1 on by pattern of operator "
                f"names, not {degrees!r}"
            )

    @property
    def _degrees_by_pattern(self) -> Mapping[str, int]:
        return self.tensor_parallel if isinstance(self.tensor_parallel, Mapping) else {}

    @property
    def _modes_by_pattern(self) -> Mapping[str, str]:
        if isinstance(self.modes, Mapping):
            return self.modes
        return {} if self.modes == "auto" else {"*": self.modes}

    def requested_mode(self, operator: str) -> Mode | None:
        """Return the mode that the user asks for the operator with this name; None if it is left to the search."""
        found = (mode for pattern, mode in self._modes_by_pattern.items() if matches(pattern, operator))
        return next(map(Mode, found), None)

    def forced_mode(self, operator: Operator) -> Mode | None:
        """Return the mode that an operator must have: as requested, or the next weaker one that it can take."""
        if operator.tensor is not None and operator.tensor.is_required:
            return Mode.TP
        requested = self.requested_mode(operator.name)
        if requested in (None, Mode.TP):
            return None
        modes = WEIGHT_MODES
        possible = set(legal_modes(operator)).intersection(self.capabilities.modes)
        return next((mode for mode in reversed(modes[: modes.index(requested) + 1]) if mode in possible), Mode.DP)

    def allowed_slices(self, operator: str) -> tuple[int, ...] | None:
        """Return the numbers of slices that the operator with this name may have if sharded; None for any."""
        if not self.capabilities.slices:
            return (1,)
        slices = self.slice_granularity
        if isinstance(slices, Mapping):
            return next(((count,) for pattern, count in slices.items() if matches(pattern, operator)), None)
        return None if slices == "auto" else (slices,)

    def _asks_for_slices(self, operator: str) -> bool:
        """Return whether the user gives a number of slices above 1, which weights that stay cut don't have."""
        return self.slice_granularity != "auto" and self.allowed_slices(operator) not in (None, (1,))

    def allowed_scopes(self, cluster: Cluster) -> tuple[tuple[ShardingScope, bool], ...]:
        """Return the pairs (scope, hierarchical) that operators may be sharded with.

        Raises:
            ConfigurationError: Sharding inside nodes is demanded, but ``cluster`` has a single level, or the links
                inside and between its nodes were not measured.
        """
        scopes = [scope for scope in available_scopes(cluster) if self.capabilities.can_shard_over(*scope)]
        allowed = tuple(pair for pair in scopes if self.sharding_group in ("auto", pair[0].value))
        if allowed:
            return allowed
        if not self.capabilities.node_scope:
            why = f"the engine {self.capabilities.engine} can't shard inside nodes"
        elif cluster.devices_by_node:
            why = f"nodes have {', '.join(map(str, cluster.devices_by_node))} devices: it needs equally many on each"
        elif not cluster.is_hierarchical:
            why = (
                f"nodes and devices of each are {cluster.nodes} x {cluster.devices_per_node}: it needs several of both"
            )
        else:
            why = "the cluster's description has no levels: it was made before they were measured"
        raise ConfigurationError(f"sharding_group='node' can't be had: {why}")

    def forced_recompute(self, block: str) -> bool | None:
        """Return whether the block with this name is recomputed; None if the search decides."""
        recompute = self.activation_checkpointing
        if isinstance(recompute, bool):
            return recompute
        if isinstance(recompute, str):  # "auto"
            return None
        return any(matches(pattern, block) for pattern in recompute)

    def requested_degree(self, operator: str) -> int | None:
        """Return over how many ranks the user asks to cut the operator with this name; None if that is not said."""
        found = (degree for pattern, degree in self._degrees_by_pattern.items() if matches(pattern, operator))
        return next(found, None)

    def patterns_of_tensor_parallelism(self) -> list[tuple[str, str]]:
        """Return the patterns of operators that the user wants tensor parallel, each after its argument's name."""
        modes = [("modes", pattern) for pattern, mode in self._modes_by_pattern.items() if mode == Mode.TP]
        return modes + [("tensor_parallel", each) for each, degree in self._degrees_by_pattern.items() if degree > 1]

    def restrict_tensor_parallel(self, model: ModelProfile, cluster: Cluster) -> ModelProfile:
        """Return ``model`` with the degrees that its operators may be tensor parallel with, here and by these wishes.

        Raises:
            ConfigurationError: The user asks for a degree that is not possible.
        """
        if not model.tensor_candidates:
            return model
        possible, present = tensor_degrees(cluster), {operator.name for operator in model.operators}
        if Mode.TP not in self.capabilities.modes or self.tensor_parallel is False:
            possible = ()
        uses: dict[str, TensorUse] = {}
        for candidate in model.tensor_candidates:
            degrees, is_required = self._allowed_degrees(candidate, possible, cluster)
            if degrees and present.issuperset(candidate.operators):
                changes = {"degrees": degrees, "is_required": is_required}
                for index, name in enumerate(candidate.operators):
                    uses[name] = candidate.use(index).model_copy(update=changes)
        operators = (operator.model_copy(update={"tensor": uses.get(operator.name)}) for operator in model.operators)
        return model.model_copy(update={"operators": tuple(operators)})

    def _allowed_degrees(
        self, candidate: TensorCandidate, possible: Sequence[int], cluster: Cluster
    ) -> tuple[tuple[int, ...], bool]:
        """Return the degrees that a candidate may have, and whether the user asks for one."""
        names = candidate.operators
        modes = {mode for name in names if (mode := self.requested_mode(name)) is not None}
        requested = [
            degree
            for pattern, degree in self._degrees_by_pattern.items()
            if any(matches(pattern, name) and self.requested_degree(name) == degree for name in names)
        ]
        if len(set(requested) - {1}) > 1:
            raise ConfigurationError(
                f"tensor_parallel: {', '.join(names)} run together and need one number of ranks, not "
                f"{' and '.join(map(str, sorted(set(requested) - {1})))}"
            )
        degrees = tuple(degree for degree in candidate.degrees if degree in possible)
        is_required = requested[0] > 1 if requested else Mode.TP in modes
        if not is_required or Mode.TP not in self.capabilities.modes:
            is_decided = requested or modes or any(self._asks_for_slices(name) for name in names)
            return () if is_decided else degrees, False
        sliced = [name for name in names if self._asks_for_slices(name)]
        if sliced and isinstance(self.slice_granularity, Mapping):
            raise ConfigurationError(f"slice_granularity: {sliced[0]} is to be tensor parallel, and is not split then")
        if modes - {Mode.TP}:
            other = " and ".join(sorted(modes - {Mode.TP}))
            raise ConfigurationError(f"modes: {', '.join(names)} run together and can't be both tp and {other}")
        wanted = tuple(degree for degree in degrees if degree in (requested[:1] or degrees))
        if requested and not wanted:
            raise ConfigurationError(_degree_error(candidate, requested[0], cluster))
        return wanted, bool(wanted)

    def check(self, model: ModelProfile, cluster: Cluster) -> None:
        """Refuse patterns that match nothing in ``model``, and modes that none of the operators asked for can take.

        Raises:
            ConfigurationError: A pattern matches no operator (or no block), only operators that can't take its mode, or
                a block that can't be recomputed.
        """
        self._check_modes(model)
        self._check_tensor_parallel(model, cluster)
        if isinstance(self.slice_granularity, Mapping):
            operators = [operator.name for operator in model.operators]
            _check_matches("slice_granularity", self.slice_granularity, operators, "operator")
        if isinstance(self.activation_checkpointing, bool | str):
            return
        names = [block.name for block in model.blocks]
        _check_matches("activation_checkpointing", self.activation_checkpointing, names, "block that repeats")
        for block in model.blocks:
            if block.recompute_blocker and self.forced_recompute(block.name):
                raise ConfigurationError(
                    f"activation_checkpointing: {block.name} can't be recomputed: {block.recompute_blocker}"
                )

    def _check_modes(self, model: ModelProfile) -> None:
        if isinstance(self.modes, Mapping):
            _check_matches("modes", self.modes, [operator.name for operator in model.operators], "operator")
        for pattern, mode in self._modes_by_pattern.items():
            if mode not in self.capabilities.modes:
                raise ConfigurationError(f"modes: the engine {self.capabilities.engine} can't carry out {mode}")
            matching = [operator for operator in model.operators if matches(pattern, operator.name)]
            if mode == Mode.TP:
                _check_any_candidate("modes", matching, model)
            elif matching and not any(mode in legal_modes(operator) for operator in matching):
                refused = max(matching, key=lambda operator: operator.num_parameters)
                raise ConfigurationError(
                    f"modes: {refused.name or 'the module itself'} can't be {mode}: {mode_blocker(refused)}"
                )

    def _check_tensor_parallel(self, model: ModelProfile, cluster: Cluster) -> None:
        names = [operator.name for operator in model.operators]
        _check_matches("tensor_parallel", self._degrees_by_pattern, names, "operator")
        for pattern, degree in self._degrees_by_pattern.items():
            if degree == 1:
                continue
            if Mode.TP not in self.capabilities.modes:
                raise ConfigurationError(
                    f"tensor_parallel: the engine {self.capabilities.engine} can't cut operators over ranks"
                )
            if not tensor_degrees(cluster):
                raise ConfigurationError(
                    f"tensor_parallel: {pattern!r} can't be cut over {degree} ranks: a node has one device"
                )
            matching = [operator for operator in model.operators if matches(pattern, operator.name)]
            _check_any_candidate("tensor_parallel", matching, model)


def _check_any_candidate(argument: str, operators: Sequence[Operator], model: ModelProfile) -> None:
    """Refuse operators of which none can be tensor parallel, if that is known."""
    if not model.knows_tensor_parallelism:
        return
    candidates = {name for candidate in model.tensor_candidates for name in candidate.operators}
    if operators and candidates.isdisjoint(operator.name for operator in operators):
        largest = max(operators, key=lambda operator: operator.num_parameters)
        raise ConfigurationError(
            f"{argument}: {largest.name or 'the module itself'} can't be tensor parallel: "
            f"{tensor_blocker(largest, model)}"
        )


def tensor_blocker(operator: Operator, model: ModelProfile) -> str:
    """Return why an operator can't be tensor parallel, in words; for one that is in no candidate."""
    return model.tensor_refusals.get(operator.name) or operator.replicated_reason or NO_TENSOR_KIND


def _degree_error(candidate: TensorCandidate, degree: int, cluster: Cluster) -> str:
    """Say why a candidate can't be cut over ``degree`` ranks."""
    possible, text = tensor_degrees(cluster), f"tensor_parallel: {', '.join(candidate.operators)} can't be cut over"
    if degree in possible:
        degrees = " or ".join(map(str, candidate.degrees))
        return f"{text} {degree} ranks: its size or its heads divide by {degrees} alone"
    devices = devices_of_each_node(cluster)
    divisors = f": use {' or '.join(map(str, possible))}" if possible else ""
    return f"{text} {degree} ranks: that does not divide the {devices} devices of a node{divisors}"


NO_TENSOR_KIND = "only Linear, Conv1D, Embedding, EmbeddingBag and MultiheadAttention modules can be"
"""Why an operator of another kind can't be tensor parallel."""


def mode_blocker(operator: Operator) -> str:
    """Return why an operator can't take every mode, in words; empty if it can."""
    if operator.replicated_reason:
        return operator.replicated_reason
    if not operator.is_shardable:
        return "its parameters are too small to be worth collectives of their own"
    if operator.tied:
        return "its weight is tied, so it is needed from one end of the model to the other"
    return "" if operator.calls == 1 else f"it runs {operator.calls} times in a step, and would be gathered each time"


def _are_patterns(patterns: object) -> bool:
    return not isinstance(patterns, Mapping) or all(isinstance(pattern, str) for pattern in patterns)


UNCONSTRAINED = SearchConstraints()


def matches(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` is a dotted prefix of ``name`` or a glob that fits it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _check_matches(argument: str, patterns: Iterable[str], names: Sequence[str], kind: str) -> None:
    """Refuse patterns that match nothing, or only what one before them decides otherwise."""
    earlier: dict[str, set[str]] = {}
    for pattern in patterns:
        found = {name for name in names if matches(pattern, name)}
        if not found:
            close = difflib.get_close_matches(pattern, names, MAX_SUGGESTIONS, cutoff=0.3) or names[:MAX_SUGGESTIONS]
            hint = f"near names: {', '.join(close)}" if close else "this model has none"
            raise ConfigurationError(f"{argument}: {pattern!r} matches no {kind} ({hint})")
        before = [other for other, others in earlier.items() if found & others]
        is_lost = found <= set().union(*earlier.values())
        if is_lost and isinstance(patterns, Mapping) and any(patterns[each] != patterns[pattern] for each in before):
            who = f"{' and '.join(map(repr, before))} come{'s' * (len(before) == 1)}"
            raise ConfigurationError(
                f"{argument}: {pattern!r} decides nothing, since {who} first and matches the same: the first "
                "pattern that matches counts, so put it before"
            )
        earlier[pattern] = found
