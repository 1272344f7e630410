"""First values for modules that were built on the meta device, one operator at a time.

Note [values do not depend on the plan]: every module that owns tensors is initialised with random numbers of its own,
seeded by one number that all ranks share and by the module's name. So the values are the same on all ranks, in
whatever order a plan has its operators sharded, and with or without sharding.

Note [what a module does itself]: what counts is ``reset_parameters`` (``_reset_parameters`` in some of torch's own) and
then the ``_init_weights`` of the innermost module around it that has one, as transformers and many GPTs do. What a
constructor does beyond that, after its submodules have been made, is not repeated.
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
    """Whether any tensor of ``module`` has no values yet."""
    return any(True for inner in module.modules() for _ in _own_meta_tensors(inner))


def check_initializable(module: nn.Module) -> None:
    """Refuses tensors on the meta device that no method is there to fill.

    Raises:
        ConfigurationError: names the tensors and what to do.
    """
    for name, inner in module.named_modules():
        names = [key for key, _ in _own_meta_tensors(inner)]
        if names and not _find_reset_functions(module, name):
            raise ConfigurationError(
                f"{_describe_module(name, inner)} was built on the meta device, but has no reset_parameters() (nor is there an "
                f"_init_weights() around it) to give {', '.join(names)} first values: add one, or create it elsewhere"
            )


class MetaInitializer:
    """Gives meta tensors of ``module`` their first values on ``device``.

    Args:
        module: all of it, so that names and enclosing modules are known.
        device: where values are made.
        group: ranks that must agree; None for a rank by itself.
    """

    def __init__(self, module: nn.Module, device: torch.device, group: Any = None) -> None:
        self._module = module
        self._device = device
        self._names = {inner: name for name, inner in module.named_modules()}
        self._seed = _broadcast_seed(device, group) if is_meta(module) else 0

    def fill(self, submodule: nn.Module) -> None:
        """Makes the tensors of ``submodule`` (a submodule, or the module itself) that have no values yet.

        Raises:
            ConfigurationError: a tensor was left as it was.
        """
        for inner in _iterate_children_first(submodule):
            tensors = dict(_own_meta_tensors(inner))
            if tensors:
                self._initialize_module(inner, tensors)

    def _initialize_module(self, inner: nn.Module, tensors: dict[str, Tensor]) -> None:
        name = self._names[inner]
        ties = [(p, p.detach().clone()) for p in inner._parameters.values() if p is not None and not p.is_meta]
        for tensor in tensors.values():
            _materialize(tensor, self._device)
        left = self._find_untouched_by_reset(name, tensors)
        if left:
            raise ConfigurationError(
                f"{_describe_module(name, inner)} was built on the meta device, but its reset_parameters() or _init_weights() "
                f"gives no values to {', '.join(left)}: let it do so, or create {'them' if len(left) > 1 else 'it'} "
                "elsewhere"
            )
        for parameter, values in ties:  # tied to one that was initialised before, or loaded: that one counts
            parameter.data.copy_(values)

    def _find_untouched_by_reset(self, name: str, tensors: dict[str, Tensor]) -> list[str]:
        """Names of tensors that have no values even after the resets. Floats show it as NaN, the rest by two tries."""
        self._reset(name, tensors, fill=0)
        left = [key for key, tensor in tensors.items() if _is_float(tensor) and tensor.isnan().any()]
        others = {key: tensor for key, tensor in tensors.items() if not _is_float(tensor) and tensor.numel()}
        zeros = {key for key, tensor in others.items() if not tensor.any()}
        if zeros:
            self._reset(name, tensors, fill=1)
            left += [key for key in zeros if bool((others[key] == 1).all())]
        return left

    def _reset(self, name: str, tensors: dict[str, Tensor], fill: int) -> None:
        for tensor in tensors.values():
            tensor.data.fill_(float("nan") if _is_float(tensor) else fill)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:7], "big"))
            for reset in _find_reset_functions(self._module, name):
                reset()


def _find_reset_functions(module: nn.Module, name: str) -> list[Reset]:
    """What gives the tensors that the submodule ``key`` itself owns their values, in order."""
    inner: Any = module.get_submodule(name)
    own = [getattr(inner, each) for each in ("reset_parameters", "_reset_parameters") if hasattr(inner, each)]
    path = name.split(".") if name else []
    around: list[Any] = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    outer = [each._init_weights for each in around if hasattr(each, "_init_weights")]
    return [*own[:1], *(partial(each, inner) for each in outer[:1])]


def _own_meta_tensors(inner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that ``inner`` itself owns and that have no values, by their own names."""
    for name, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
        if tensor is not None and tensor.is_meta:
            yield name, tensor


def _materialize(tensor: Tensor, device: torch.device) -> None:
    """Memory for a meta tensor, in place: whoever holds it (an optimizer, a tied module) still does."""
    real: Tensor = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


def _iterate_children_first(module: nn.Module) -> Iterator[nn.Module]:
    """In the order in which constructors finish."""
    for child in module.children():
        yield from _iterate_children_first(child)
    yield module


def _broadcast_seed(device: torch.device, group: Any) -> int:
    """A random number, the first rank's on all ranks."""
    seed = torch.randint(1 << 62, (1,)).to(device)
    if group is not None:
        dist.broadcast(seed, src=dist.get_global_rank(group, 0), group=group)
    return int(seed)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _describe_module(name: str, inner: nn.Module) -> str:
    return f"{name} ({type(inner).__name__})" if name else type(inner).__name__
