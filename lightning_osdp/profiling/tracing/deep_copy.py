"""Deep copies of modules whatever they hold: a stand-in for what can't be copied, and closures over copies."""

from __future__ import annotations

import copy
import copyreg
import io
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MAX_STAND_INS = 50
"""Objects that are replaced before a copy is given up."""

LOCK_TYPES = (type(threading.Lock()), type(threading.RLock()))
FILE_TYPES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "__dict__")
"""Where a module keeps functions that run in a step."""


class StandIn:
    """Takes the place of an object that can't be copied: every method does nothing; it has no values to give."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_kind":
            super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        """Do nothing."""
        return self

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise self._error("draws from")

    def __getitem__(self, key: Any) -> Any:
        raise self._error("reads")

    def __bool__(self) -> bool:
        return True

    def _error(self, verb: str) -> RuntimeError:
        return RuntimeError(
            f"the step {verb} a {self._kind} that the module or a variable holds, which can't be copied, and planning "
            "may not use it up: give its class a __deepcopy__, or draw its values in the dataset"
        )


def deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy. Files that are written become ones that nothing reads, and what can't be copied a stand-in.

    Args:
        value: The object to copy.
        memo: Copies that exist already by the id of their originals; filled with all others.

    Raises:
        Exception: A module refuses to be copied (its own error).
    """
    given = dict(memo)
    keep_alive: list[Any] = []
    with _copiers_of_handles():
        for _ in range(MAX_STAND_INS):
            memo.clear()
            memo.update(given)
            try:
                copied = copy.deepcopy(value, memo)
                break
            except Exception as error:  # any class may refuse in its own way
                refused = _refused_object(error)
                if refused is None or id(refused) in given:
                    raise
                keep_alive.append(refused)
                given[id(refused)] = _stand_in_for(refused)
        else:
            return copy.deepcopy(value, memo)
    if isinstance(copied, nn.Module):
        _rebind_closures(copied, memo)
    return copied


def _refused_object(error: BaseException) -> Any:
    """Return the outermost object of the failed copy that is neither a module nor a builtin container."""
    trace, found = error.__traceback__, []
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            found.append(trace.tb_frame.f_locals["x"])
        trace = trace.tb_next
    containers = (nn.Module, dict, list, tuple, set, torch.optim.Optimizer)
    return next((each for each in found if not isinstance(each, containers)), None)


def _stand_in_for(refused: Any) -> Any:
    if isinstance(refused, Tensor):  # a result of autograd
        return refused.detach().clone()
    return StandIn(type(refused).__name__)


@contextmanager
def _copiers_of_handles() -> Iterator[None]:
    """Teach ``copy`` locks and files until the end of the block, and that threads can't be copied."""
    copiers: dict[type, Callable[[Any], Any]] = {
        LOCK_TYPES[0]: lambda _: (threading.Lock, ()),
        LOCK_TYPES[1]: lambda _: (threading.RLock, ()),
        torch.Generator: lambda each: (_make_generator, (each.device, bytes(each.get_state().tolist()))),
        **dict.fromkeys(FILE_TYPES, _reduce_file),
    }
    before = dict(copyreg.dispatch_table)
    copyreg.dispatch_table.update(copiers)
    threading.Thread.__deepcopy__ = _refuse_thread  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():  # from Python 3.12 on, where it still works
            warnings.filterwarnings("ignore", ".*deepcopy support will be removed from itertools", DeprecationWarning)
            yield
    finally:
        del threading.Thread.__deepcopy__  # type: ignore[attr-defined]
        copyreg.dispatch_table.clear()
        copyreg.dispatch_table.update(before)


def _refuse_thread(thread: threading.Thread, _memo: object) -> None:
    raise TypeError(f"{thread.name} is a thread")


def _reduce_file(file: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Describe a file that reads the same, or one in memory that takes what is written."""
    is_text = isinstance(file, io.TextIOBase)
    if file.closed or file.writable():
        return (io.StringIO if is_text else io.BytesIO), ()
    return _open_at, (file.name, is_text, file.tell())


class _TextFile(io.TextIOWrapper):
    """Closes itself, as nobody else does."""

    def __del__(self) -> None:
        self.close()


class _BinaryFile(io.FileIO):
    def __del__(self) -> None:
        self.close()


def _open_at(name: Any, is_text: bool, position: int) -> Any:
    file = _TextFile(io.BufferedReader(_BinaryFile(name))) if is_text else _BinaryFile(name)
    file.seek(position)
    return file


def _make_generator(device: torch.device, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    with torch._C.DisableTorchFunction():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _rebind_closures(copied: nn.Module, memo: dict[int, Any]) -> None:
    """Make functions in the copied modules' hooks and attributes use the copies of what they close over."""
    for module in copied.modules():
        for name in HOOKS:
            functions = module.__dict__ if name == "__dict__" else module.__dict__.get(name, {})
            for key, value in functions.items():
                if isinstance(value, types.FunctionType) and value.__closure__:
                    functions[key] = _with_copied_cells(value, memo)


def _with_copied_cells(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    cells = tuple(_copied_cell(cell, memo) for cell in function.__closure__ or ())
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    name, defaults = function.__name__, function.__defaults__
    copied = types.FunctionType(function.__code__, function.__globals__, name, defaults, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied


def _copied_cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return cell
    return types.CellType(memo[id(content)]) if id(content) in memo and memo[id(content)] is not content else cell
