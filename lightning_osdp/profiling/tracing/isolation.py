"""Restores what steps on a copy can reach besides the copy: closures, globals, callbacks; and files and output."""

from __future__ import annotations

import builtins
import io
import logging
import os
import random
import shutil
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import _lru_cache_wrapper, cache, partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.profiling.tracing.deep_copy import deep_copy

MAX_OBJECTS = 20_000
"""Objects that are looked at; a walk that meets more ends there."""

MAX_ITEMS = 1_000
"""Items of one list or dict that are followed; all of them are restored."""

MAX_SAVED_BYTES = 1 << 20
"""Size of a tensor or array up to which its values are restored."""

MAX_SAVED_TOTAL_BYTES = 64 << 20
"""Size of all restored values together."""

ATOMS = (str, bytes, int, float, complex, bool, type(None), range, torch.dtype, torch.device, torch.Size)
OURS = "lightning_osdp"
BUILD_TOOLS = frozenset(["torch", "triton", "numba", "cupy", "jax", OURS])
"""Libraries that compile kernels, whose files are theirs."""

FILE_CHANGES = {
    os: ("mkdir", "makedirs", "remove", "unlink", "rename", "replace", "rmdir", "symlink", "link"),
    shutil: ("rmtree", "move", "copy", "copyfile", "copy2", "copytree"),
}
_MISSING = object()


@contextmanager
def isolated(*roots: Any) -> Iterator[None]:
    """Undo at the end of the block what it did to objects that can be reached from ``roots``, and let it write nothing.

    What is found: attributes, containers, small tensors, random generators and counters, through modules, the Trainer's
    callbacks and data loaders, functions, their closures and the globals that they name.
    """
    with restored(*roots, stands_in=True), without_output():
        yield


# -- objects -----------------------------------------------------------------------------------------------------------


@contextmanager
def restored(*roots: Any, stands_in: bool = False) -> Iterator[None]:
    """Undo at the end of the block what it did to objects that can be reached from ``roots``.

    With ``stands_in`` copies take the place of files, iterators and generators that variables hold, within the block.
    """
    snapshot = Snapshot(roots, stands_in)
    try:
        yield
    finally:
        snapshot.restore()


class Snapshot:
    """The state of all objects that can be reached from some roots."""

    def __init__(self, roots: Iterable[Any], stands_in: bool = False) -> None:
        self._stands_in = stands_in
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []
        self._bytes_left = MAX_SAVED_TOTAL_BYTES
        self._queue: deque[Any] = deque(roots)
        while self._queue and len(self._seen) < MAX_OBJECTS:
            value = self._queue.popleft()
            if not isinstance(value, ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._save(value)
        self._queue.clear()

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            try:
                undo()
            except (TypeError, AttributeError, ValueError, KeyError, RuntimeError):  # a class that forbids it
                continue
        self._undo.clear()

    def _save(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._save_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.dtype != object and self._can_save(value.nbytes):
                self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, list | deque | set | dict):
            self._save_container(value)
        elif isinstance(value, tuple | frozenset):
            self._follow(value)
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.RandomState):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._undo.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, types.FunctionType):
            self._save_function(value)
        elif isinstance(value, types.MethodType):
            self._queue += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            self._queue += [value.func, value.args, value.keywords]
        elif isinstance(value, _lru_cache_wrapper):
            self._queue.append(value.__wrapped__)
            self._undo.append(partial(_forget_new_results, value, value.cache_info().misses))
        elif isinstance(value, type):
            self._save_class(value)
        elif isinstance(value, pl.Trainer):
            self._save_trainer(value)
        elif isinstance(value, io.IOBase):
            self._save_position(value)
        elif not isinstance(value, types.ModuleType | threading.Thread | logging.Logger):
            self._save_instance(value)

    def _follow(self, values: Iterable[Any]) -> None:
        self._queue += [each for each, _ in zip(values, range(MAX_ITEMS), strict=False) if not isinstance(each, ATOMS)]

    def _save_tensor(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_inference():
            return
        self._undo.append(partial(_restore_gradient, tensor, tensor.grad if tensor.is_leaf else None))
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if is_trained or tensor.layout != torch.strided or tensor.is_meta:
            return
        if self._can_save(tensor.nbytes):
            self._undo.append(partial(_restore_values, tensor, tensor._version, tensor.detach().clone()))
        else:
            self._undo.append(partial(_warn_if_changed, tensor, tensor._version))

    def _can_save(self, num_bytes: int) -> bool:
        fits = num_bytes <= min(MAX_SAVED_BYTES, self._bytes_left)
        self._bytes_left -= num_bytes if fits else 0
        return fits

    def _save_container(self, container: Any) -> None:
        if isinstance(container, dict):
            saved = dict(container)
            self._undo.append(partial(_restore_dict, container, saved))
            self._follow(saved.values())
        else:
            copied = list(container)
            self._undo.append(partial(_restore_items, container, copied))
            self._follow(copied)

    def _save_position(self, file: Any) -> None:
        with suppress(OSError, ValueError):  # it is closed or no file, or is being iterated over
            if file.seekable() and not file.writable():
                self._undo.append(partial(file.seek, file.tell()))

    def _save_instance(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] == OURS:
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._save_container(attributes)
        if is_users(kind):
            for name in {name for each in kind.__mro__ for name in _slots(each)}:
                if hasattr(value, name):
                    self._save_binding(partial(getattr, value), partial(setattr, value), name)
        self._queue.append(kind)

    def _save_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if is_users(each):
                for name, value in list(vars(each).items()):
                    function = getattr(value, "__func__", getattr(value, "fget", value))
                    if isinstance(function, types.FunctionType | _lru_cache_wrapper):
                        self._queue.append(function)
                    elif not name.startswith("__") and not hasattr(value, "__get__"):
                        self._save_binding(partial(_class_value, each), partial(setattr, each), name)

    def _save_function(self, function: types.FunctionType) -> None:
        if not _is_users_module(function.__module__):
            return
        self._queue += [function.__dict__, function.__defaults__, function.__kwdefaults__]
        self._queue.append(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():
            if cell != types.CellType():  # else nothing is assigned yet
                self._save_binding(partial(getattr, cell), partial(setattr, cell), "cell_contents")
        names = _names_of(function.__code__)
        spaces = [function.__globals__]
        spaces += [
            vars(space)
            for name in names
            if isinstance(space := function.__globals__.get(name), types.ModuleType)
            and _is_users_module(space.__name__)
        ]
        for space in spaces:
            for name in names & space.keys():
                if not isinstance(space[name], types.ModuleType):
                    self._save_binding(space.__getitem__, space.__setitem__, name)

    def _save_binding(self, get: Callable[[str], Any], set_: Callable[[str, Any], None], name: str) -> None:
        value = get(name)
        self._queue.append(value)
        if not isinstance(value, type | types.FunctionType):
            self._undo.append(lambda: None if get(name) is value else set_(name, value))
            if self._stands_in and hasattr(type(value), "__next__") and not is_users(type(value)):
                set_(name, deep_copy(value, {}))

    def _save_trainer(self, trainer: Any) -> None:
        fit = trainer.fit_loop
        sources = (fit._data_source, fit.epoch_loop.val_loop._data_source)
        self._queue += [*trainer.callbacks, trainer.datamodule, *(source.instance for source in sources)]
        for value in vars(trainer._logger_connector).values():
            if isinstance(value, dict):
                self._save_container(value)
        saved = {name: value for name, value in vars(trainer).items() if isinstance(value, ATOMS)}
        self._undo.append(lambda: vars(trainer).update(saved))


def referenced_values(function: Callable[..., Any]) -> list[Any]:
    """Return what a Python function closes over and the user's globals that it names."""
    if not isinstance(function, types.FunctionType) or not _is_users_module(function.__module__):
        return []
    names = _names_of(function.__code__) & function.__globals__.keys()
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [*cells, *(function.__globals__[name] for name in names)]


def is_users(kind: type) -> bool:
    """Return whether a class is neither of the standard library nor of an installed package."""
    return _is_users_module(kind.__module__)


@cache
def _is_users_module(name: str | None) -> bool:
    root = (name or "builtins").partition(".")[0]
    if (root in sys.stdlib_module_names and root != "__main__") or root == OURS:
        return False
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


@cache
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and those inside it."""
    inner = [_names_of(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _class_value(kind: type, name: str) -> Any:
    return vars(kind).get(name, _MISSING)


def _restore_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    if tensor.is_leaf and tensor.grad is not gradient:
        tensor.grad = gradient


def _restore_values(tensor: Tensor, version: int, values: Tensor) -> None:
    if tensor._version != version:
        with torch.no_grad():
            tensor.detach().copy_(values)


def _warn_if_changed(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        warnings.warn(
            f"training_step writes into a tensor of shape {tuple(tensor.shape)} outside of the module. Planning ran "
            f"the step, and restores tensors of up to {MAX_SAVED_BYTES >> 20} MiB: what it wrote there stays. Make the "
            "tensor a buffer of the module, of which planning uses a copy",
            OSDPWarning,
            stacklevel=2,
        )


def _forget_new_results(cached: Any, misses: int) -> None:
    """Empty a cache of ``functools`` that has new results: they may be fake, or belong to a copy."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


def _restore_dict(container: dict[Any, Any], saved: dict[Any, Any]) -> None:
    found = dict.items(container)
    if len(found) != len(saved) or any(saved.get(key, _MISSING) is not value for key, value in found):
        dict.clear(container)
        dict.update(container, saved)


def _restore_items(container: Any, saved: list[Any]) -> None:
    if len(container) != len(saved) or any(a is not b for a, b in zip(container, saved, strict=True)):
        container.clear()
        container.update(saved) if isinstance(container, set) else container.extend(saved)


# -- files and output --------------------------------------------------------------------------------------------------


@contextmanager
def without_output() -> Iterator[None]:
    """Let this thread's Python code write no file, print nothing and log nothing until the end of the block."""
    thread, disabled = threading.get_ident(), logging.root.manager.disable
    real_open = open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = set(mode) & set("wax+") and not isinstance(file, int)
        if writes and threading.get_ident() == thread and not _is_of_build_tool():
            file, mode = os.devnull, mode.replace("x", "w")
        return real_open(file, mode, *args, **kwargs)

    def skipped(change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not _is_of_build_tool():
            return None
        return change(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, "open", open_))
        stack.enter_context(mock.patch.object(io, "open", open_))
        stack.enter_context(mock.patch.object(torch, "save"))
        for module, names in FILE_CHANGES.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, partial(skipped, getattr(module, name))))
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.callback(logging.disable, disabled)
        logging.disable(logging.CRITICAL)
        yield


def _is_of_build_tool() -> bool:
    """Return whether the innermost code that is not of the standard library belongs to a tool that builds kernels."""
    frame = sys._getframe(2)
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root not in sys.stdlib_module_names or root == "__main__":
            return root in BUILD_TOOLS
        frame = frame.f_back  # type: ignore[assignment]
    return False
