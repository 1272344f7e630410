"""Runs a copy of a module up to one linear layer, with random inputs, and other linear layers that cost nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.engine.key_value_cache import describe_unused, is_dynamic_cache, only_own_layer
from lightning_osdp.engine.splittable import matrix_input_dim
from lightning_osdp.engine.tensor_parallel.inner_features import SeenFunctions
from lightning_osdp.errors import message_of
from lightning_osdp.profiling.tracing.deep_copy import deep_copy
from lightning_osdp.profiling.tracing.host_syncs import UnknownNumber

aten = torch.ops.aten

SMALL_PARAMETER = 1 << 16
"""Elements up to which a parameter gets random numbers of its own; a larger one repeats a number."""

SHORT = 3
"""Rows per sample that are played instead of a long sequence."""

NOT_COMPILED: Any = "fail_on_recompile"
"""Stance in which it is an error to run what ``torch.compile`` has made: it could not ask the class of slices."""

ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class Refusal(Exception):
    """The operators may not be cut, or it can't be known; its text says why."""


class _Reached(BaseException):
    """The row operator was reached: nothing after it matters."""


def call_module(home: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a module without what its class does around it, such as recomputation."""
    return nn.Module.__call__(home, *args, **kwargs)


@dataclass(frozen=True)
class Scene:
    """What is played: a call of a module in which the column operators and the row operator run."""

    home: nn.Module
    args: tuple[Any, ...]
    """Arguments of its call; fake tensors stand for random ones, real tensors for permutations of their rows."""
    kwargs: Mapping[str, Any]
    columns: tuple[nn.Module, ...]
    row: nn.Module
    scope: nn.Module | None
    """Module that is called with gathered arguments; None if the columns gather their input by themselves."""
    batch_rows: int
    """First dimension of tensors that are gathered."""
    long_dim: int = 0
    """Size of dimensions that are played shorter; 0 for none."""
    keeps_width: bool = False
    """Whether the last of three dimensions stays as it is, because there may be ``long_dim`` features."""
    run: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any] = call_module
    """Runs the copy of ``home``."""
    stateless: tuple[nn.Module, ...] = ()
    """Modules that must not change their own state."""
    shared: tuple[Any, ...] = ()
    """Objects that are not copied, and all parameters of the model."""


class PlayedModule:
    """A copy of a scene's module, on which ranks are played."""

    def __init__(self, scene: Scene, dtype: torch.dtype, long_dim: int = 0, true_mask: bool = True) -> None:
        """Copy the module with random parameters.

        Args:
            scene: What is played.
            dtype: Type of all floating-point numbers.
            long_dim: Size of dimensions that are played as ``SHORT``; 0 for none.
            true_mask: Whether the first element along the last dimension of Boolean tensors is True, or False.
        """
        self.scene, self.dtype, self.long_dim, self.true_mask = scene, dtype, long_dim, true_mask
        self._generator = torch.Generator().manual_seed(0)
        memo: dict[int, Any] = {id(each): each for each in scene.shared}
        memo.update({id(p): self._stand_in(p) for p in scene.home.parameters()})
        try:
            self.copy: nn.Module = deep_copy(scene.home, memo)
        except Exception as error:  # a class may refuse in its own way
            raise Refusal(f"it can't be copied: {type(error).__name__}") from error
        for each in self.copy.modules():
            for name, buffer in each._buffers.items():
                each._buffers[name] = self._buffer(buffer)
        try:
            self._columns = [memo[id(column)] for column in scene.columns]
            self._scope = None if scene.scope is None else memo[id(scene.scope)]
            row = memo[id(scene.row)]
        except KeyError:
            raise Refusal("it is called by a module that does not contain it") from None
        self.attribute_owners = [] if self._scope is None else attribute_owners(self._scope)
        self._stateless = [memo[id(each)] for each in scene.stateless if id(each) in memo]
        self._parameters = [p for p in self.copy.parameters() if p.requires_grad]
        for each in self.copy.modules():
            if (input_dim := matrix_input_dim(each)) is not None:
                self._replace_product(each, input_dim)
        row.forward = self._reach
        if self._scope is not None:
            self._scope_forward = self._scope.forward
            self._scope.forward = functools.wraps(self._scope_forward)(functools.partial(self._run_scope))
        self._on_scope: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]
        self._on_column: Callable[[int, Tensor], Tensor]
        self._reached: Tensor | None = None
        self.seen = SeenFunctions()
        """Functions that run from the first column, or the start of the scope, to the row."""

    def _random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, generator=generator or self._generator)

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.dtype.is_floating_point:
            raise Refusal(f"a parameter has the type {parameter.dtype}")
        if parameter.numel() <= SMALL_PARAMETER:
            values = 0.3 * self._random(*parameter.shape) + 0.7
        else:
            values = self._random(1).expand(parameter.shape)
        return nn.Parameter(values, parameter.requires_grad)

    def _buffer(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or not buffer.dtype.is_floating_point:
            return buffer if buffer is None or not buffer.is_meta else torch.ones(buffer.shape, dtype=buffer.dtype)
        return self._random(*buffer.shape) if buffer.is_meta else buffer.to("cpu", self.dtype)

    def _replace_product(self, module: nn.Module, input_dim: int) -> None:
        """Give the copied linear layer a product of rank one, which costs nothing, plus a number per feature."""
        assert isinstance(module.weight, Tensor)
        inputs, outputs = module.weight.shape[input_dim], module.weight.shape[1 - input_dim]
        left, right, bias = self._random(inputs) / inputs**0.5, self._random(outputs), self._random(outputs)
        index = next((i for i, column in enumerate(self._columns) if column is module), None)
        if index is None:
            product = functools.partial(self._other_product, left, right, bias)
        else:
            product = functools.partial(self._column_product, index)
            module.__dict__["_vectors"] = (left, right)
        module.forward = product

    def _other_product(self, left: Tensor, right: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        self.seen.add("linear", "addmm", "size", "view")
        with torch._C.DisableTorchFunction():
            return (x.to(self.dtype) @ left).unsqueeze(-1) * right + bias

    def _column_product(self, index: int, x: Tensor) -> Tensor:
        self.seen.is_on = True
        with torch._C.DisableTorchFunction():
            return self._on_column(index, x)

    def _reach(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise Refusal("it is recomputed by reentrant checkpointing, or runs without gradients")
        self._reached = x
        raise _Reached

    def _run_scope(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            args, kwargs = self._on_scope(args, kwargs)
        self.seen.is_on = True
        return self._scope_forward(*args, **kwargs)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run(self, rank: int, seed: int, times: int = 1) -> Tensor:
        """Run the copy with a rank's arguments, so many times the rows; return the input of the row operator."""
        generators = torch.Generator().manual_seed(1000 * seed + rank + 1), torch.Generator().manual_seed(seed + 1)
        args, kwargs = self._arguments((self.scene.args, dict(self.scene.kwargs)), rank, times, *generators)
        self._reached = None
        torch.manual_seed(seed)
        try:
            stance = torch.compiler.set_stance(NOT_COMPILED)
            with stance, torch.enable_grad(), _MeanDropout(), self.seen:  # type: ignore[no-untyped-call]
                self.scene.run(self.copy, args, kwargs)
        except _Reached:
            pass
        except Refusal:
            raise
        except Exception as error:  # The user's code runs here and may raise anything.
            text = message_of(error).strip().split("\n")[0][:100]
            if "torch.compile stance" in text:
                raise Refusal("it runs what torch.compile has made") from error
            raise Refusal(f"{type(error).__name__}: {text}") from error
        finally:
            self.seen.is_on = False
        if self._reached is None:
            raise Refusal("it does not run every time")
        if self.seen.hooks:
            raise Refusal(f"{self.seen.hooks[0]} in between shows gradients")
        return self._reached

    def _product(self, index: int, x: Tensor, right: Tensor) -> Tensor:
        left, _ = self._columns[index]._vectors
        product: Tensor = (x.to(self.dtype) @ left).unsqueeze(-1) * right
        return product

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _arguments(self, value: Any, rank: int, times: int, own: torch.Generator, common: torch.Generator) -> Any:
        """Return ``value`` with real tensors; those without a row for each sample are the same on all ranks."""
        if isinstance(value, Tensor):
            has_rows = value.dim() > 0 and value.shape[0] == self.scene.batch_rows
            return self._argument(value, rank, own, times) if has_rows else self._argument(value, 0, common)
        if isinstance(value, UnknownNumber):
            raise Refusal("it depends on a number that .item() reads from a tensor")
        again = functools.partial(self._arguments, rank=rank, times=times, own=own, common=common)
        if isinstance(value, list | tuple):
            items = [again(each) for each in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) is dict:
            return {key: again(each) for key, each in value.items()}
        if is_dynamic_cache(value) and describe_unused(value, self.scene.scope):
            return only_own_layer(value, self.scene.scope)
        is_kept = isinstance(value, ATOMS) or not (is_dynamic_cache(value) or _holds_tensors(value))
        return value if is_kept else self._empty_like(value)

    def _argument(self, tensor: Tensor, rank: int, generator: torch.Generator, times: int = 1) -> Tensor:
        shape = [SHORT if size == self.long_dim else size for size in tensor.shape]
        if times > 1:
            shape[0] *= times
        if self.scene.keeps_width and tensor.dim() == 3:
            shape[-1] = tensor.shape[-1]
        if tensor.dtype.is_floating_point:
            return self._random(*shape, generator=generator)
        if not _is_fake(tensor):
            return torch.cat([tensor.cpu().roll(rank, 0)] * times) if tensor.dim() else tensor.cpu()
        values = torch.randint(0, 2, shape, generator=generator)
        if values.dim():
            values[..., 0] = int(self.true_mask)
        return values.to(tensor.dtype)

    def _empty_like(self, value: Any) -> Any:
        """Return an empty object in the place of one that holds fake tensors, as a cache of keys and values does."""
        try:
            return type(value)()
        except Exception:  # any class may ask for arguments, and check them
            if self._scope is None:  # only what happens between the operators matters
                return None
            raise Refusal(f"{type(value).__name__} can't be made anew") from None


class _MeanDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside it, dropout keeps everything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if func is aten.native_dropout.default:
            x, p, _ = args
            return x / (1 - p), torch.ones_like(x, dtype=torch.bool)
        return func(*args, **(kwargs or {}))


def attribute_owners(scope: nn.Module) -> list[nn.Module]:
    """Return the modules whose whole numbers may have to be divided, the scope first."""
    return [each for each in scope.modules() if matrix_input_dim(each) is None]


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (nn.Module, *ATOMS)) or depth == 0:
        return False
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    inner += list(getattr(value, "__dict__", {}).values())
    return any(_holds_tensors(each, depth - 1) for each in inner) or any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(value)
    )
