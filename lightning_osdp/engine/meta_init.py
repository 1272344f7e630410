"""Initial values for modules that were built on the meta device, one operator at a time.

Note [values do not depend on the plan]: every module that owns tensors is initialized with random numbers of its own,
seeded by one number that all ranks share and by the module's name. So the values are the same on all ranks, in whatever
order a plan shards operators, and with or without sharding.

Note [what a module does itself]: what counts is ``reset_parameters`` (``_reset_parameters`` in some of torch's modules)
and then the ``_init_weights`` of the innermost module around it that has one, as in transformers and many GPTs. What a
constructor does after its submodules have been made is not repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.errors import ConfigurationError

Reset = Callable[[], object]


def is_meta(module: nn.Module) -> bool:
    """Return whether any tensor of ``module`` has no values yet."""
    return any(True for inner in module.modules() for _ in _own_meta_tensors(inner))


def check_initializable(module: nn.Module) -> None:
    """Refuse tensors on the meta device for which no method creates values.

    Raises:
        ConfigurationError: names the tensors and what to do.
    """
    for name, inner in module.named_modules():
        names = [key for key, _ in _own_meta_tensors(inner)]
        if names and not _find_reset_functions(module, name):
            raise ConfigurationError(
                f"{_describe_module(name, inner)} was built on the meta device, but has no reset_parameters() (nor is "
                f"there an _init_weights() around it) to give {', '.join(names)} first values: add one, or create it "
                "elsewhere"
            )


class MetaInitializer:
    """Gives meta tensors of ``module`` their initial values on ``device``.

    Args:
        module: the full module, so that names and enclosing modules are known.
        device: where values are created.
        group: ranks that must agree on them; None for a single rank.
    """

    def __init__(self, module: nn.Module, device: torch.device, group: Any = None) -> None:
        self._module = module
        self._device = device
        self._names = {inner: name for name, inner in module.named_modules()}
        self._seed = _broadcast_seed(device, group) if is_meta(module) else 0

    def fill(self, submodule: nn.Module) -> None:
        """Create the tensors of ``submodule`` (or of the module itself) that have no values yet.

        Raises:
            ConfigurationError: the module's own methods give a tensor no values.
        """
        for inner in _iterate_children_first(submodule):
            tensors = dict(_own_meta_tensors(inner))
            if tensors:
                self._initialize_module(inner, tensors)

    def _initialize_module(self, inner: nn.Module, tensors: dict[str, Tensor]) -> None:
        name = self._names[inner]
        # Parameters that are there are tied to ones that were initialized before, or loaded: their values stay.
        existing = [(p, p.detach().clone()) for p in inner._parameters.values() if p is not None and not p.is_meta]
        for tensor in tensors.values():
            _materialize(tensor, self._device)
        untouched = self._find_untouched_by_reset(name, tensors)
        if untouched:
            raise ConfigurationError(
                f"{_describe_module(name, inner)} was built on the meta device, but its reset_parameters() or "
                f"_init_weights() gives no values to {', '.join(untouched)}: let it do so, or create "
                f"{'them' if len(untouched) > 1 else 'it'} elsewhere"
            )
        for parameter, values in existing:
            parameter.data.copy_(values)

    def _find_untouched_by_reset(self, name: str, tensors: dict[str, Tensor]) -> list[str]:
        """Return the names of tensors that the module's methods do not write, after running these methods.

        Floats that were not written are still NaN. Other types are filled with 0, and if that remains, with 1.
        """
        self._reset(name, tensors, fill=0)
        untouched = [key for key, tensor in tensors.items() if _is_float(tensor) and tensor.isnan().any()]
        others = {key: tensor for key, tensor in tensors.items() if not _is_float(tensor) and tensor.numel()}
        zeros = {key for key, tensor in others.items() if not tensor.any()}
        if zeros:
            self._reset(name, tensors, fill=1)
            untouched += [key for key in zeros if bool((others[key] == 1).all())]
        return untouched

    def _reset(self, name: str, tensors: dict[str, Tensor], fill: int) -> None:
        for tensor in tensors.values():
            tensor.data.fill_(float("nan") if _is_float(tensor) else fill)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:7], "big"))
            for reset in _find_reset_functions(self._module, name):
                reset()


def _find_reset_functions(module: nn.Module, name: str) -> list[Reset]:
    """Return what gives the tensors that submodule ``name`` itself owns their values, in order."""
    inner: Any = module.get_submodule(name)
    own = [getattr(inner, method) for method in ("reset_parameters", "_reset_parameters") if hasattr(inner, method)]
    path = name.split(".") if name else []
    enclosing: list[Any] = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    outer = [outer_module._init_weights for outer_module in enclosing if hasattr(outer_module, "_init_weights")]
    return [*own[:1], *(partial(init_weights, inner) for init_weights in outer[:1])]


def _own_meta_tensors(inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that ``inner`` itself owns and that have no values, with their names."""
    for name, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
        if tensor is not None and tensor.is_meta:
            yield name, tensor


def _materialize(tensor: Tensor, device: torch.device) -> None:
    """Allocate a meta tensor in place, so that optimizers and tied modules still refer to it."""
    real: Tensor = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


def _iterate_children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules in the order in which their constructors finish."""
    for child in module.children():
        yield from _iterate_children_first(child)
    yield module


def _broadcast_seed(device: torch.device, group: Any) -> int:
    """Return a random number, the same on all ranks."""
    seed = torch.randint(1 << 62, (1,)).to(device)
    if group is not None:
        dist.broadcast(seed, src=dist.get_global_rank(group, 0), group=group)
    return int(seed)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _describe_module(name: str, inner: nn.Module) -> str:
    return f"{name} ({type(inner).__name__})" if name else type(inner).__name__
