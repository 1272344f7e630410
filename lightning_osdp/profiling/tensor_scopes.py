"""Finds the operators that may be tensor parallel: embeddings, linear layers, pairs of them, and attentions.

The dataflow of a traced forward shows which linear layers (columns) feed another one (row) with no third in between.
Such a group is a candidate if nothing else sees what the columns give; playing the ranks decides (``tensor_proof``):

- Pair: the columns read one tensor, and what happens until the row treats rows and features one by one, as in an MLP.
  Each column gathers its own input. Its ``scope`` is the row operator.
- Attention: a module that encloses the columns is called with gathered arguments. Whole numbers of modules in it
  (heads, widths) may have to be divided by the degree, and a fused projection cut in each of its parts.

Groups that do the same in modules of one class are proven once. A layer that is in no group is a candidate by itself.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_osdp.engine.tensor_parallel.check import has_hooks
from lightning_osdp.errors import format_error
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.tensor import TensorCandidate, TensorRole
from lightning_osdp.profiling import tensor_proof
from lightning_osdp.profiling.kernels.benchmark import tensors_of
from lightning_osdp.profiling.tensor_leaks import find_leak
from lightning_osdp.profiling.tensor_operators import (
    call_refusal,
    count_heads,
    cut_size,
    describe_refused_groups,
    has_tensor_kind,
    is_linear,
    planned_columns,
    refusal,
    role_of,
    size_refusal,
)
from lightning_osdp.profiling.tensor_proof import Cut, PlayedGroup
from lightning_osdp.profiling.tensor_stage import NOT_COMPILED, Refusal, Scene, call_module
from lightning_osdp.profiling.tracing import stand_ins
from lightning_osdp.profiling.tracing.dataflow import MANY_SOURCES, Call, Dataflow
from lightning_osdp.profiling.tracing.optimizer_step import build_optimizers
from lightning_osdp.profiling.tracing.parameter_owners import is_compiled

MAX_SECONDS = 2.0
"""Processor time that all proofs of a model may take."""

MAX_ATTRIBUTES = 3
"""Attributes that are divided at once."""

MAX_PARTS = 3
"""Parts of a fused projection: query, key and value."""

MAX_ELEMENTS = 1 << 22
"""Largest tensor that is played at its full length."""

MAX_MODULES = 256
"""Modules of the largest module that is copied for a proof."""

NO_TIME, NO_CUT = "there was no time to try it", "no way to cut them gives what the module gives"
"""Reasons of refusals."""

LONG = 8
"""Sequences that are longer than this are played shorter where they can be."""


@dataclass(frozen=True)
class TensorFindings:
    """What may be tensor parallel, and why the rest may not."""

    candidates: tuple[TensorCandidate, ...] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Reasons by operator, in words for the user."""
    group_refusals: Mapping[str, str] = field(default_factory=dict)
    """With which others an operator may not be, and why."""


@dataclass(frozen=True)
class TracedModule:
    """A module whose forward was recorded on a fake copy.

    Attributes:
        module: the user's module.
        fake: its copy, which ran.
        flow: what it did.
        batch_size: number of samples that it ran with.
        batch: that many rows of the user's batch, real.
        differentiated_twice: names of parameters that gradients depend on which are differentiated again.
    """

    module: LightningModule
    fake: nn.Module
    flow: Dataflow
    batch_size: int
    batch: Any
    differentiated_twice: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Group:
    """Columns that feed a row, by the calls in which they do."""

    columns: tuple[str, ...]
    row: str
    column_calls: tuple[tuple[Call, ...], ...]
    row_calls: tuple[Call, ...]


@dataclass(frozen=True)
class _Proven:
    degrees: tuple[int, ...]
    parts: int
    attributes: tuple[tuple[int, str], ...]
    values: tuple[int, ...]
    """Those of the attributes in the module for which it was proven."""
    functions: tuple[str, ...]


def find_tensor_candidates(
    traced: TracedModule, operators: Sequence[Operator], degrees: Sequence[int]
) -> TensorFindings:
    """Return what may be tensor parallel over each number of ranks in ``degrees``, and the reasons for the rest."""
    return _Finder(traced, operators, degrees).find_candidates()


def _run_step(module: nn.Module, args: tuple[Any, ...], _: object) -> None:
    """Run the training step on a copy of the user's module."""
    assert isinstance(module, LightningModule)
    module.__dict__["_device"] = torch.device("cpu")
    optimizers: list[Any] = []
    with stand_ins.detached_from_trainer(module, optimizers, []), torch.compiler.set_stance(NOT_COMPILED):
        if not module.automatic_optimization:
            optimizers += build_optimizers(module)[0]
        batch = stand_ins.move_batch(module, args[0], torch.device("cpu"))
        module.training_step(*stand_ins.step_arguments(module, batch))


class _Finder:
    def __init__(self, traced: TracedModule, operators: Sequence[Operator], degrees: Sequence[int]) -> None:
        self._traced, self._flow = traced, traced.flow
        self._degrees = sorted(degrees)
        self._modules = dict(traced.module.named_modules())
        self._names = {id(each): name for name, each in traced.fake.named_modules()}
        twice = traced.differentiated_twice
        reasons = {each.name: refusal(each, self._modules[each.name], twice) for each in operators}
        self._usable = {name for name, reason in reasons.items() if not reason}
        self._refusals = {
            name: reason for name, reason in reasons.items() if reason and has_tensor_kind(self._modules[name])
        }
        self._operators = operators
        self._calls: dict[str, list[int]] = defaultdict(list)
        for number, call in enumerate(self._flow.calls):
            self._calls[self._names.get(id(call.module), "")].append(number)
        self._proofs: dict[tuple[object, ...], _Proven | str] = {}
        self._deadline_s = time.process_time() + MAX_SECONDS
        self._planned = planned_columns(self._modules)

    def find_candidates(self) -> TensorFindings:
        """Find pairs first, then attentions, then single operators."""
        candidates: dict[str, TensorCandidate] = {}
        refused: dict[tuple[str, ...], str] = {}
        for with_scope in (False, True):
            for group in self._groups():
                names = (*group.columns, group.row)
                if not candidates.keys().isdisjoint(names):
                    continue
                found = self._prove(group, with_scope)
                if isinstance(found, TensorCandidate):
                    candidates.update(dict.fromkeys(names, found))
                elif names not in refused or found not in ("", NO_CUT):
                    refused[names] = found
        group_refusals = describe_refused_groups(refused, set(candidates))
        for operator in self._operators:
            name = operator.name
            if name in self._usable and name not in candidates:
                if name not in self._calls:
                    self._refusals[name] = "the training step does not call it"
                elif reason := size_refusal(self._modules[name], self._degrees) or self._call_refusal(name):
                    self._refusals[name] = reason
                else:
                    candidates[name] = self._single(operator)
        order = {operator.name: index for index, operator in enumerate(self._operators)}
        unique = {each.operators: each for each in candidates.values()}
        ordered = sorted(unique.values(), key=lambda each: min(order[name] for name in each.operators))
        return TensorFindings(tuple(ordered), self._refusals, group_refusals)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[_Group]:
        """Yield the groups of usable linear layers, in the order in which the rows run."""
        rows = [name for name in self._calls if name in self._usable and is_linear(self._modules[name])]
        for row in rows:
            row_calls = [self._flow.calls[number] for number in self._calls[row]]
            for narrow in (False, True) if self._planned else (False,):
                sources = [self._columns_of(call, narrow) for call in row_calls]
                names = {tuple(self._name(each) for each in calls) for calls in sources}
                if len(names) != 1 or names == {()}:
                    continue
                (columns,) = names
                if len(set(columns)) < len(columns) or row in columns or not self._usable.issuperset(columns):
                    continue
                if any(len(self._calls[name]) != len(row_calls) for name in columns):
                    continue
                yield _Group(columns, row, tuple(sources), tuple(row_calls))

    def _columns_of(self, row: Call, narrow: bool) -> tuple[Call, ...]:
        """Return the calls that feed the row; with ``narrow`` those alone that the module's own plan cuts."""
        if row.input_sources >= MANY_SOURCES:
            return ()
        calls = [self._flow.calls[number] for number in sorted(row.input_sources)]
        return tuple(call for call in calls if not narrow or self._name(call) in self._planned)

    def _name(self, call: Call) -> str:
        name: str = self._names.get(id(call.module), "")
        return name

    # -- proofs -------------------------------------------------------------------------------------------------------

    def _prove(self, group: _Group, with_scope: bool) -> TensorCandidate | str:
        """Return the group as a candidate if all its calls may be cut in the same way, or why it is none."""
        proofs, scope_names = set(), set()
        for columns, row in zip(group.column_calls, group.row_calls, strict=True):
            scope = self._scope_of(columns) if with_scope else None
            if with_scope and (scope is None or self._name(scope) in ("", group.row)):
                return ""
            if not with_scope and len({column.input_key for column in columns}) > 1:
                return "they read different inputs"
            if leak := find_leak(self._flow, columns, row, scope):
                return leak
            proven = self._prove_once(columns, row, scope)
            if isinstance(proven, str):
                return proven
            proofs.add(proven)
            scope_names.add(group.row if scope is None else self._name(scope))
        if len(proofs) != 1 or len(scope_names) != 1:
            return "its calls differ"
        return self._candidate(group, proofs.pop(), scope_names.pop(), with_scope)

    def _candidate(self, group: _Group, proven: _Proven, scope: str, with_scope: bool) -> TensorCandidate:
        module = self._modules[scope]
        attributes = [tensor_proof.attribute_name(module, each) for each in proven.attributes]
        inputs, between = 0, dict[str, nn.Module]()
        for calls, row in zip(group.column_calls, group.row_calls, strict=True):
            around = self._scope_of(calls) if with_scope else None
            given = tensors_of(((around or calls[0]).args, (around or calls[0]).kwargs))
            inputs += sum(each.nbytes for each in given if self._has_rows(each, calls))
            between |= self._modules_between(calls, row, around)
        outputs = sum(each.nbytes for call in group.row_calls for each in tensors_of(call.output))
        return TensorCandidate(
            operators=(*group.columns, group.row),
            roles=(*[TensorRole.COLUMN] * len(group.columns), TensorRole.ROW),
            parts=(*[proven.parts] * len(group.columns), 1),
            scope=scope,
            attributes=tuple(f"{scope}.{name}" for name in attributes),
            needs_agreement=with_scope,
            inner_modules=tuple(name for name in between if name not in ("", scope)),
            functions=proven.functions,
            degrees=proven.degrees,
            input_bytes=inputs / self._traced.batch_size,
            output_bytes=outputs / self._traced.batch_size,
        )

    def _has_rows(self, tensor: Tensor, columns: Sequence[Call]) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == _first_tensor(columns[0]).shape[0]

    def _scope_of(self, columns: Sequence[Call]) -> Call | None:
        """Return the innermost call that encloses those of the columns."""
        common = _common([column.stack[:-1] for column in columns])
        return self._flow.calls[common[-1]] if common else None

    def _prove_once(self, columns: Sequence[Call], row: Call, scope: Call | None) -> _Proven | str:
        """Return the proof of one group, or that of an equal one that was proven before; or why there is none."""
        stacks = [row.stack[:-1], *(column.stack[:-1] for column in columns)]
        common = _common(stacks if scope is None else [row.stack[:-1], scope.stack])
        home = self._flow.calls[common[-1]] if common else None
        for name, module in self._modules_between(columns, row, scope).items():
            if has_hooks(module):
                return f"{name} has hooks, which would see a slice"
            if is_compiled(module):
                return f"{name} is compiled by torch.compile"
        key = self._kind(columns, row, scope, home)
        known = self._proofs.get(key)
        if isinstance(known, _Proven) and scope is not None:
            values = tensor_proof.attribute_values(self._modules[self._name(scope)], known.attributes)
            known = known if values == known.values else None
        if known is None:
            try:
                known = self._play(self._scene(columns, row, scope, home), columns)
            except Refusal as refusal:
                known = str(refusal)
            except Exception as error:  # The user's code runs here and may give anything.
                known = format_error(error)
            self._proofs[key] = known
        return known

    def _kind(self, columns: Sequence[Call], row: Call, scope: Call | None, home: Call | None) -> tuple[object, ...]:
        """Return a key that is equal for groups that do the same: class, functions, shapes and dataflow."""
        flow, start = self._flow, home.start if home is not None else 0
        numbers: dict[int, int] = {}

        def renumber(storages: Any) -> tuple[int, ...]:
            return tuple(sorted(numbers.setdefault(each, len(numbers)) for each in sorted(storages)))

        trace = [
            (event.signature, renumber(event.read_storages), renumber(event.written_storages))
            for event in flow.events[start : row.stop]
        ]
        prefix = self._name(home) if home is not None else ""
        members = (*columns, row, *([scope] if scope is not None else []))
        names = tuple(self._name(call).removeprefix(prefix) for call in members)
        kind = type(self._modules[self._name(home)]) if home is not None else None
        return (kind, names, scope is None, hash(tuple(trace)))

    def _scene(self, columns: Sequence[Call], row: Call, scope: Call | None, home: Call | None) -> Scene:
        traced = self._traced
        whole = traced.module if home is None else self._modules[self._name(home)]
        if sum(1 for _ in itertools.islice(whole.modules(), MAX_MODULES + 1)) > MAX_MODULES:
            raise Refusal("the module that it is part of is too large to be tried")
        modules = self._modules_between(columns, row, scope)
        hidden = _first_tensor(columns[0])
        given = [] if scope is None else [t for t in tensors_of((scope.args, scope.kwargs)) if t.dim() > 1]
        if any(len(t) != len(hidden) for t in [t for t in given if t.is_floating_point()][:1]):
            raise Refusal("its first argument has no row for each sample")
        scene = Scene(
            home=traced.module,
            args=(traced.batch,),
            kwargs={},
            columns=tuple(self._modules[self._name(call)] for call in columns),
            row=self._modules[self._name(row)],
            scope=None if scope is None else self._modules[self._name(scope)],
            batch_rows=hidden.shape[0],
            run=_run_step,
            stateless=tuple(modules.values()),
            shared=(*traced.module.parameters(), *stand_ins.shared_objects(traced.module)),
        )
        if home is None:
            return scene
        module = self._modules[self._name(home)]
        widths = {_first_tensor(call).shape[-1] for call in (row, *columns)}
        long_dim = hidden.shape[1] if hidden.dim() > 2 and hidden.shape[1] > max(LONG, len(hidden)) else 0
        return replace(
            scene,
            home=module,
            args=home.args,
            kwargs=home.kwargs,
            run=call_module,
            long_dim=long_dim,
            keeps_width=long_dim in widths,
            stateless=(*scene.stateless, module),
        )

    def _modules_between(self, columns: Sequence[Call], row: Call, scope: Call | None) -> dict[str, nn.Module]:
        """Return the scope and what runs until the row, or around one of the operators: all may see a slice."""
        first = min(column.start for column in columns)
        around = {*_common([row.stack, *(column.stack for column in columns)]), row.stack[-1]}
        calls = [call for number, call in enumerate(self._flow.calls) if number not in around]
        calls = [call for call in calls if call.start < row.stop and max(call.start, call.stop - 1) >= first]
        calls += [scope] if scope is not None else []
        names = [self._name(call) for call in calls if not any(call is column for column in columns)]
        return {name: self._modules[name] for name in names}

    def _play(self, scene: Scene, columns: Sequence[Call]) -> _Proven:
        played = self._start(scene, max(tensors_of(call.output)[0].numel() for call in columns))
        for at, first in enumerate(self._degrees):
            if any(first % smaller == 0 for smaller in self._degrees[:at]):
                continue  # what can't be cut in two can't be cut in four
            cut = next((each for each in self._cuts(scene, first) if self._holds(played, each)), None)
            if cut is not None:
                later = (each for each in self._degrees[at + 1 :] if self._holds(played, replace(cut, degree=each)))
                values = () if scene.scope is None else tensor_proof.attribute_values(scene.scope, cut.attributes)
                functions = tuple(sorted(played.seen.names))
                return _Proven((first, *later), cut.parts, cut.attributes, values, functions)
        self._check_time()
        counts = {} if scene.scope is None else count_heads(scene.scope)
        counts |= {"features": tensors_of(columns[0].output)[0].shape[-1]}
        indivisible = (f"{name} = {count}" for name, count in counts.items() if count % self._degrees[0])
        name = next(indivisible, "")
        raise Refusal(f"{self._degrees[0]} does not divide {name}" if name else NO_CUT)

    def _holds(self, played: PlayedGroup, cut: Cut) -> bool:
        """Return whether the cut was tried in time and gives what the module gives without it."""
        try:
            self._check_time()
            played.check(cut)
        except Refusal:
            return False
        return True

    def _cuts(self, scene: Scene, degree: int) -> Iterator[Cut]:
        attributes = tensor_proof.integer_attributes(scene.scope, degree) if scene.scope is not None else []
        parts = range(1, MAX_PARTS + 1) if len(scene.columns) == 1 else (1,)
        for count in range(min(MAX_ATTRIBUTES, len(attributes)) + 1):
            for chosen in itertools.combinations(attributes, count):
                for each in parts:
                    yield Cut(degree, each, chosen)

    def _start(self, scene: Scene, num_elements: int) -> PlayedGroup:
        """Return a group for the scene that has run without a cut, as short and precise as it can be."""
        lengths = [scene.long_dim] if scene.long_dim else []
        lengths += [0] if num_elements <= MAX_ELEMENTS else []
        reason = "it is too large to be tried"
        for length, dtype, true_mask in itertools.product(lengths, tensor_proof.TOLERANCES, (True, False)):
            self._check_time()
            try:
                return PlayedGroup(scene, dtype, length, true_mask)
            except Refusal as refusal:
                reason = str(refusal)
        raise Refusal(reason)

    def _check_time(self) -> None:
        if time.process_time() > self._deadline_s:
            raise Refusal(NO_TIME)

    # -- single operators ---------------------------------------------------------------------------------------------

    def _call_refusal(self, name: str) -> str:
        return call_refusal(self._modules[name], (self._flow.calls[number] for number in self._calls[name]))

    def _single(self, operator: Operator) -> TensorCandidate:
        module, calls = self._modules[operator.name], [self._flow.calls[each] for each in self._calls[operator.name]]
        given = ({id(each): each for each in tensors_of((call.args, call.kwargs))} for call in calls)
        inputs = sum(each.nbytes for tensors in given for each in tensors.values())
        role = role_of(module, self._degrees)
        outputs = sum(each.nbytes for call in calls for each in tensors_of(call.output))
        return TensorCandidate(
            operators=(operator.name,),
            roles=(role,),
            degrees=tuple(each for each in self._degrees if cut_size(module, role) % each == 0),
            input_bytes=inputs / self._traced.batch_size,
            output_bytes=outputs / self._traced.batch_size,
        )


def _common(stacks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return what all stacks begin with."""
    return tuple(
        each[0] for each in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))
    )


def _first_tensor(call: Call) -> Tensor:
    return tensors_of((call.args, call.kwargs))[0]
