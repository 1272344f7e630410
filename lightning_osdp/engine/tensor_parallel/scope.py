"""Scopes: a module, such as an attention, is called with the arguments of all ranks, and some heads on each.

Its tensors with one entry for each sample are gathered. All others have to be alike on all ranks; where arguments
differ, or can't be told apart, each rank runs the module for itself with whole weights.

Note [caches]: a cache of keys and values does not matter while the module's layer of it is empty. A run with slices
leaves this rank's heads of all samples there, guarded as all that is between the operators (``inner_features``). Nobody
read them in the traced step, and who does so later is refused, also if the cache is given to another run. Without
gradients (``generate``) a cache is there to be read, so that such runs have whole weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_osdp.engine.key_value_cache import describe_unused, is_dynamic_cache
from lightning_osdp.engine.sliced_operator import cast_for_autocast
from lightning_osdp.engine.tensor_parallel.inner_features import tensors_in
from lightning_osdp.engine.tensor_parallel.operator import TensorOperator
from lightning_osdp.engine.tensor_parallel.operator_run import SlicedRun
from lightning_osdp.engine.tensor_parallel.pair import PairUnit, version_of
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups
from lightning_osdp.engine.tensor_parallel.unit import UnitContext
from lightning_osdp.errors import ShardingError
from lightning_osdp.state.guarded_parameter import without_guards

_CHECKSUMS = WeakTensorKeyDictionary()
"""Checksums of tensors that were given to scopes, as a mask is to each layer, with their versions."""

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class ScopeUnit(PairUnit):
    """Gathers the arguments of a module that encloses its column operators.

    Args:
        name: the module's name.
        operators: as of ``TensorUnit``.
        groups: as of ``TensorUnit``.
        context: as of ``TensorUnit``.
        module: the module.
        attributes: modules and names of whole numbers that are divided by the degree while it runs.
    """

    def __init__(
        self,
        name: str,
        operators: Sequence[TensorOperator],
        groups: TensorGroups,
        context: UnitContext,
        module: nn.Module,
        attributes: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self._module, self._attributes = module, attributes
        self._known_rows: dict[tuple[int, ...], list[bool]] = {}
        super().__init__(name, operators, groups, context)

    def _replaced_modules(self) -> list[nn.Module]:
        return [self._module, *super()._replaced_modules()]

    def _install(self) -> None:
        super()._install()
        self._replace_forward(self._module, self._run_scope)

    def _run_scope(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin_run()
        tensors = list(tensors_in((args, kwargs)))
        first = next((t for t in tensors if t.dim() > 1 and t.is_floating_point()), None)
        found = None if first is None else self._find_rows(tensors, first)
        gathered = found or []
        needed = sum(1 << index for index, tensor in enumerate(gathered) if tensor.requires_grad)
        alike = "" if found is None or self._shows_slices else _describe_call((args, kwargs), gathered, self._module)
        run, _ = self.start([0 if first is None else len(first)], alike, needed, gathered[0] if gathered else None)
        self._run, self._input = run, first
        if not isinstance(run, SlicedRun):
            return own(*args, **kwargs)
        by_id = {id(tensor): self._guard(run.gather(tensor, index)) for index, tensor in enumerate(gathered)}
        args, kwargs = map_tensors((args, kwargs), lambda tensor: by_id.get(id(tensor), tensor))
        versions = [_version_of_inner(tensor) for tensor in by_id.values()]
        with self._divided_attributes():
            result = own(*args, **kwargs)
        if versions != [_version_of_inner(tensor) for tensor in by_id.values()]:
            raise ShardingError(
                f"{self.label} is tensor parallel, and changes what it is given in place, which it did not when the "
                "plan was made: train without tensor parallelism, OSDPCallback(tensor_parallel=False)"
            )
        return result

    def _find_rows(self, tensors: Sequence[Tensor], first: Tensor) -> list[Tensor] | None:
        """Return the tensors with one entry for each sample, of which ``first`` is one; None if that can't be told.

        Where another dimension is as large as there are samples, it is told by what was found in an earlier call.
        """
        samples, kinds = len(first), tuple(tensor.dim() for tensor in tensors)
        found = [_has_rows(tensor, samples) for tensor in tensors]
        has_others = any(has and tensor is not first for has, tensor in zip(found, tensors, strict=True))
        if has_others and (samples == 1 or any(samples in tensor.shape[1:] for tensor in tensors)):
            if kinds in self._known_rows:
                found = [has and known for has, known in zip(found, self._known_rows[kinds], strict=True)]
            elif samples == 1 or samples in first.shape[1:]:
                return None
        else:
            self._known_rows[kinds] = found
        return list({id(tensor): tensor for has, tensor in zip(found, tensors, strict=True) if has}.values())

    def _run_column(self, operator: TensorOperator, own: Any, input: Tensor) -> Tensor:
        """Return the output features of this rank for the samples of all ranks."""
        if self._run is None:
            raise self._incomplete_run(operator)
        self._called.add(operator)
        x = cast_for_autocast(input if self._inner is None else self._inner.take(input, is_result=False))
        return self._guard(operator.multiply(x, self._run.weight_of(operator), self._run.bias_of(operator)))

    @contextmanager
    def _divided_attributes(self) -> Iterator[None]:
        before = [vars(module)[name] for module, name in self._attributes]
        try:
            for (module, name), value in zip(self._attributes, before, strict=True):
                vars(module)[name] = value // self.groups.degree
            yield
        finally:
            for (module, name), value in zip(self._attributes, before, strict=True):
                vars(module)[name] = value


def _version_of_inner(tensor: Tensor) -> int:
    with without_guards():
        return version_of(tensor)


def _has_rows(tensor: Tensor, samples: int) -> bool:
    """Return whether a tensor has a row for each sample."""
    return tensor.dim() > 0 and len(tensor) == samples and not isinstance(tensor, nn.Parameter)


def _describe_call(arguments: Any, gathered: Sequence[Tensor], module: nn.Module) -> str:
    """Return what has to be equal on all ranks, or nothing if there is an object that may hold anything."""
    parts = list(_describe(arguments, {id(tensor) for tensor in gathered}, module))
    return "" if None in parts else " ".join(map(str, parts))


def _describe(value: Any, gathered: Container[int], module: nn.Module) -> Iterator[object]:
    """Yield what describes arguments of a module; None for an object that may hold anything."""
    if isinstance(value, Tensor):
        has_rows = id(value) in gathered
        yield (value.dtype, value.shape[1:] if has_rows else value.shape, value.dim())
        yield 0 if has_rows or isinstance(value, nn.Parameter) else _checksum(value)
    elif isinstance(value, list | tuple):
        yield type(value).__name__
        for each in value:
            yield from _describe(each, gathered, module)
    elif type(value) is dict:
        for key, each in value.items():
            yield key
            yield from _describe(each, gathered, module)
    elif is_dynamic_cache(value):
        yield (torch.is_grad_enabled() and describe_unused(value, module)) or None  # see Note [caches]
    else:
        yield repr(value) if isinstance(value, _ATOMS) else None


def unknown_argument(value: Any, module: nn.Module) -> str:
    """Return the class of an object in nested arguments that may hold anything; empty if there is none.

    Args:
        value: the arguments.
        module: what is given them; a cache whose layer for it is empty is none.
    """
    if isinstance(value, list | tuple) or type(value) is dict:
        each = value.values() if isinstance(value, dict) else value
        return next(filter(None, (unknown_argument(item, module) for item in each)), "")
    return "" if isinstance(value, (Tensor, *_ATOMS)) or describe_unused(value, module) else type(value).__name__


def _checksum(tensor: Tensor) -> int:
    """Return a number that is another one where values are: a tensor without rows has to be the same on all ranks."""
    version = version_of(tensor)
    known, checksum = _CHECKSUMS.get(tensor, (None, 0))  # type: ignore[no-untyped-call]
    if known != version:
        checksum = crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
        _CHECKSUMS[tensor] = version, checksum
    return int(checksum)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested arguments with every tensor replaced by ``function`` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(each, function) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: map_tensors(each, function) for key, each in value.items()}
    return value
