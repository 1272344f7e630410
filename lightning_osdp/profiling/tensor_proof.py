"""Plays the ranks of a tensor parallel group in one process, to prove that linear layers may be cut.

Some column operators feed a row operator. Each rank is to hold a slice of the columns' output features and of the row's
input features, and runs the code in between for the rows of all ranks. That is right if what reaches the row on each
rank is a slice of what reaches it without a cut, for whatever the columns give; and the same backward. So no weights
are needed: the columns give random numbers, from which every slice follows, and nothing runs after the row.

Ranks get different inputs. Numbers are random, in float64 where the module can do that, so that nothing in between can
hide behind zeros; and dropout multiplies by its mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.engine.splittable import matrix_input_dim
from lightning_osdp.profiling.tracing.deep_copy import deep_copy
from lightning_osdp.profiling.tracing.host_syncs import UnknownNumber

aten = torch.ops.aten

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5}
"""Largest difference from the module without a cut, relative to the largest number of a row. Modules compute some
things in float32 whatever they are given."""

NUM_INPUTS = 2
"""Random inputs that each cut is tried with; from the second on, rows differ in scale by up to 10,000."""

MAX_ROW_SOURCES = 4
"""Ranks whose rows are gathered; a group of more has no other kind of row."""

SMALL_PARAMETER = 1 << 16
"""Elements up to which a parameter gets random numbers of its own; a larger one repeats a number."""

SHORT = 3
"""Rows per sample that are played instead of a long sequence."""

PADDING_ROWS = 2
"""Rows that are appended to those of each rank where rows are flattened, as ranks with fewer rows do."""

ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class Refusal(Exception):
    """The operators may not be cut, or nobody knows: the reason, in words for the user."""


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
    run: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any] = call_module
    """Runs the copy of ``home``."""
    stateless: tuple[nn.Module, ...] = ()
    """Modules that must not change their own state."""
    shared: tuple[Any, ...] = ()
    """Objects that are not copied, and all parameters of the model."""


@dataclass(frozen=True)
class Cut:
    """A way to cut: over how many ranks, in how many parts of a fused projection, dividing which attributes."""

    degree: int
    parts: int = 1
    attributes: tuple[tuple[int, str], ...] = ()
    """Modules, by their index in ``Stage.attribute_owners``, and names."""


@dataclass
class Run:
    """One run up to the row operator, and its gradients."""

    reached: Tensor
    """Input of the row operator."""
    products: list[Tensor]
    """Random parts of what the columns gave."""
    inputs: list[Tensor]
    """Inputs of the columns, or tensor arguments of the scope."""
    column_inputs: list[Tensor]
    cotangent: Tensor | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    """Of ``products``, of ``inputs`` and of the parameters."""


class Stage:
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
        self._plain_runs: dict[tuple[int, int], Run] = {}
        self._on_scope: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] = lambda args, kwargs: (
            args,
            kwargs,
        )
        self._on_column: Callable[[int, Tensor], Tensor]
        self._reached: Tensor | None = None

    # -- the copy -----------------------------------------------------------------------------------------------------

    def _random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, generator=generator or self._generator)

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
            module.forward = lambda x: (x.to(self.dtype) @ left).unsqueeze(-1) * right + bias
        else:
            module.forward = lambda x: self._on_column(index, x)
            module.__dict__["_vectors"] = (left, right)

    def _reach(self, x: Tensor) -> Tensor:
        self._reached = x
        raise _Reached

    def _run_scope(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._on_scope(args, kwargs)
        return self._scope_forward(*args, **kwargs)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run(self, rank: int, seed: int) -> Tensor:
        """Run the copy with a rank's arguments; return the input of the row operator."""
        generators = torch.Generator().manual_seed(1000 * seed + rank + 1), torch.Generator().manual_seed(seed + 1)
        args, kwargs = self._arguments((self.scene.args, dict(self.scene.kwargs)), rank, *generators)
        self._reached = None
        torch.manual_seed(seed)
        try:
            with torch.enable_grad(), _MeanDropout():  # type: ignore[no-untyped-call]
                self.scene.run(self.copy, args, kwargs)
        except _Reached:
            pass
        except Refusal:
            raise
        except Exception as error:  # The user's code runs here and may raise anything.
            text = str(error).strip().split("\n")[0][:100]
            raise Refusal(f"{type(error).__name__}: {text}") from error
        if self._reached is None:
            raise Refusal("it does not run every time")
        return self._reached

    def plain_run(self, rank: int, seed: int) -> Run:
        """Return what a rank does without any cut."""
        if (rank, seed) in self._plain_runs:
            return self._plain_runs[rank, seed]
        generator = torch.Generator().manual_seed(77 + 1000 * seed + rank)
        products: list[Tensor] = []
        column_inputs: list[Tensor] = []
        leaves: dict[int, tuple[Tensor, Tensor]] = {}

        def leaf_of(tensor: Tensor) -> Tensor:
            if id(tensor) not in leaves:
                leaves[id(tensor)] = (tensor, _leaf(tensor))
            return leaves[id(tensor)][1]

        def on_column(index: int, x: Tensor) -> Tensor:
            x = x if self._scope is not None else leaf_of(x)
            _, right = self._columns[index]._vectors
            product = self._random(*x.shape[:-1], len(right), generator=generator)
            if seed and self._scope is None:
                product *= 10 ** (4 * torch.rand(*x.shape[:-1], 1, dtype=self.dtype, generator=generator) - 2)
            products.append(_leaf(product))
            column_inputs.append(x.detach())
            return self._product(index, x, right) + products[-1]

        self._on_column = on_column
        self._on_scope = lambda args, kwargs: _map_tensors((args, kwargs), leaf_of)
        before = [_state_of(each) for each in self._stateless]
        run = Run(self._run(rank, seed), products, [leaf for _, leaf in leaves.values()], column_inputs)
        for each, state in zip(self._stateless, before, strict=True):
            if _state_of(each) != state:
                raise Refusal(f"{type(each).__name__} changes its own state")
        run.cotangent = self._random(*run.reached.shape, generator=generator)
        self._differentiate(run)
        self._check_alive(run)
        self._plain_runs[rank, seed] = run
        return run

    def _product(self, index: int, x: Tensor, right: Tensor) -> Tensor:
        left, _ = self._columns[index]._vectors
        product: Tensor = (x.to(self.dtype) @ left).unsqueeze(-1) * right
        return product

    def _differentiate(self, run: Run) -> None:
        if not run.reached.requires_grad:
            raise Refusal("no gradient goes through it")
        wanted = [*run.products, *(each for each in run.inputs if each.requires_grad), *self._parameters]
        assert run.cotangent is not None
        try:
            gradients = torch.autograd.grad(run.reached, wanted, run.cotangent.to(run.reached.dtype), allow_unused=True)
        except RuntimeError as error:
            raise Refusal(str(error).split("\n")[0][:100]) from error
        run.gradients = list(gradients)

    def _check_alive(self, run: Run) -> None:
        """Refuse runs that prove nothing, because most of what flows is zero or no number."""
        for tensor in (run.reached, *run.gradients[: len(run.products)]):
            if tensor is None or not tensor.isfinite().all():
                raise Refusal(
                    "random inputs give no finite numbers" if tensor is not None else "no gradient reaches it"
                )
            if tensor.reshape(-1, tensor.shape[-1]).ne(0).any(0).double().mean() < 0.5:
                raise Refusal("it is zero for random inputs")

    # -- a cut --------------------------------------------------------------------------------------------------------

    def check(self, cut: Cut) -> None:
        """Play the ranks of a group.

        Raises:
            Refusal: What they give differs from what the module gives without the cut.
        """
        for seed in range(NUM_INPUTS):
            plain = [self.plain_run(rank, seed) for rank in range(min(cut.degree, MAX_ROW_SOURCES))]
            for is_flat in (False, True) if self._scope is None else (False,):
                self._check_layout(cut, plain, seed, is_flat)

    def _check_layout(self, cut: Cut, plain: list[Run], seed: int, is_flat: bool) -> None:
        features = {len(self._columns[i]._vectors[1]) for i in range(len(self._columns))}
        if any(size % (cut.degree * cut.parts) for size in features) or plain[0].reached.shape[-1] % cut.degree:
            raise Refusal(f"{cut.degree} does not divide its features")
        gather = functools.partial(_gather, is_flat=is_flat)
        expected = gather([run.reached for run in plain])
        cotangent = gather([_given(run.cotangent) for run in plain], padding=0.0)
        num_products = len(plain[0].products)
        sums: list[Tensor | None] = [None] * (len(plain[0].gradients) - num_products)
        products = [gather([run.products[i] for run in plain]) for i in range(num_products)]
        for rank in range(cut.degree):
            played = self._played_run(cut, rank, plain, products, seed, is_flat)
            self._compare(played.reached, _slice(expected, rank, cut.degree), is_flat, plain)
            played.cotangent = _slice(cotangent, rank, cut.degree)
            self._differentiate(played)
            for i in range(num_products):
                whole = gather([_given(run.gradients[i]) for run in plain], padding=0.0)
                own = played.gradients[i]
                self._compare(own, _slice(whole, rank, cut.degree, cut.parts), is_flat, plain)
            sums = [_add(total, new) for total, new in zip(sums, played.gradients[num_products:], strict=True)]
        self._compare_sums(sums, plain, num_products, is_flat)

    def _compare_sums(self, sums: Sequence[Tensor | None], plain: list[Run], begin: int, is_flat: bool) -> None:
        """Compare gradients of inputs and parameters, which the ranks of the group have in parts."""
        inputs = [each for each in plain[0].inputs if each.requires_grad]
        for index, total in enumerate(sums):
            own = [run.gradients[begin + index] for run in plain]
            known = [each for each in own if each is not None]
            if not known:
                if total is not None and total.abs().max() > 0:
                    raise Refusal("it has a gradient that the module does not have without a cut")
                continue
            if index < len(inputs) and self._is_gathered(inputs[index]):
                zeros = [torch.zeros_like(inputs[index]) if each is None else each for each in own]
                self._compare(total, _gather(zeros, is_flat, padding=0.0), is_flat, plain)
            else:
                self._compare(total, functools.reduce(torch.add, known), False, plain)

    def _is_gathered(self, tensor: Tensor) -> bool:
        return self._scope is None or (tensor.dim() > 0 and tensor.shape[0] == self.scene.batch_rows)

    def _played_run(
        self, cut: Cut, rank: int, plain: list[Run], products: Sequence[Tensor], seed: int, is_flat: bool
    ) -> Run:
        """Run a rank of a group, up to the row operator."""
        own = plain[rank % len(plain)]
        slices: list[Tensor] = []
        gathered = [self._gather_input([run.inputs[i] for run in plain], is_flat) for i in range(len(own.inputs))]
        leaves = dict(zip(map(id, own.inputs), gathered, strict=True))
        order: dict[int, Tensor] = {}
        numbers = iter(own.inputs)

        def leaf_of(tensor: Tensor) -> Tensor:
            if id(tensor) not in order:
                order[id(tensor)] = leaves[id(next(numbers))]
                keep.append(tensor)
            return order[id(tensor)]

        keep: list[Tensor] = []

        def on_column(index: int, x: Tensor) -> Tensor:
            if len(slices) >= len(products):
                raise Refusal("it runs more than once")
            if self._scope is None:
                x = leaf_of(x)
            else:
                self._compare(x, torch.cat([run.column_inputs[len(slices)] for run in plain]), False, plain)
            _, right = self._columns[index]._vectors
            slices.append(_leaf(_slice(products[len(slices)], rank, cut.degree, cut.parts)))
            return self._product(index, x, _slice(right, rank, cut.degree, cut.parts)) + slices[-1]

        self._on_column = on_column
        self._on_scope = lambda args, kwargs: _map_tensors((args, kwargs), leaf_of)
        try:
            with _DividedAttributes(self.attribute_owners, cut):
                reached = self._run(rank % len(plain), seed)
        except StopIteration:
            raise Refusal("it is called in different ways") from None
        return Run(reached, slices, gathered, [])

    def _gather_input(self, tensors: Sequence[Tensor], is_flat: bool) -> Tensor:
        if self._is_gathered(tensors[0]):
            return _leaf(_gather(tensors, is_flat))
        if not all(torch.equal(tensors[0], each) for each in tensors):
            raise Refusal("an argument without a row for each sample differs between ranks")
        return _leaf(tensors[0])

    def _compare(self, found: Tensor | None, expected: Tensor, is_flat: bool, plain: list[Run]) -> None:
        """Refuse a difference, but for the rows of padding."""
        if found is None or found.shape != expected.shape:
            shape = None if found is None else tuple(found.shape)
            raise Refusal(f"a rank's part has the shape {shape} instead of {tuple(expected.shape)}")
        if is_flat:
            keep = [size for run in plain for size in (_num_rows(run.reached), PADDING_ROWS)]
            found, expected = (torch.cat(torch.split(each, keep)[::2]) for each in (found, expected))
        difference, size = (found - expected).abs(), expected.abs()
        if expected.dim():
            difference, size = difference.amax(-1), size.amax(-1)
        smallest = (1e-9 if self._scope is None else 1e-3) * float(size.max()) + 1e-300
        limit = TOLERANCES[self.dtype] * size.clamp(min=smallest)
        if not (difference <= limit).all():
            error = float((difference / size.clamp(min=1e-300)).max())
            raise Refusal(f"the ranks' parts differ from the whole by {error:.1e}")

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _arguments(self, value: Any, rank: int, own: torch.Generator, common: torch.Generator) -> Any:
        """Return ``value`` with real tensors; those without a row for each sample are the same on all ranks."""
        if isinstance(value, Tensor):
            has_rows = value.dim() > 0 and value.shape[0] == self.scene.batch_rows
            return self._argument(value, rank if has_rows else 0, own if has_rows else common)
        if isinstance(value, UnknownNumber):
            raise Refusal("it depends on a number that .item() reads from a tensor")
        again = functools.partial(self._arguments, rank=rank, own=own, common=common)
        if isinstance(value, list | tuple):
            items = [again(each) for each in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) is dict:
            return {key: again(each) for key, each in value.items()}
        return value if isinstance(value, ATOMS) or not _holds_tensors(value) else self._empty_like(value)

    def _argument(self, tensor: Tensor, rank: int, generator: torch.Generator) -> Tensor:
        shape = [SHORT if size == self.long_dim else size for size in tensor.shape]
        if tensor.dtype.is_floating_point:
            return self._random(*shape, generator=generator)
        if not _is_fake(tensor):
            return tensor.cpu().roll(rank, 0) if tensor.dim() else tensor.cpu()
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


class _DividedAttributes:
    """Divides attributes of modules by the degree until the end of the block."""

    def __init__(self, owners: Sequence[nn.Module], cut: Cut) -> None:
        self._fields = [(vars(owners[index]), name) for index, name in cut.attributes]
        self._degree = cut.degree
        self._before = [fields[name] for fields, name in self._fields]

    def __enter__(self) -> None:
        for (fields, name), value in zip(self._fields, self._before, strict=True):
            if value % self._degree:
                raise Refusal(f"{self._degree} does not divide {name} = {value}")
            fields[name] = value // self._degree

    def __exit__(self, *_: object) -> None:
        for (fields, name), value in zip(self._fields, self._before, strict=True):
            fields[name] = value


def attribute_owners(scope: nn.Module) -> list[nn.Module]:
    """Return the modules whose whole numbers may have to be divided, the scope first."""
    return [each for each in scope.modules() if matrix_input_dim(each) is None]


def integer_attributes(scope: nn.Module, degree: int) -> list[tuple[int, str]]:
    """Return the whole numbers of a scope's modules that can be divided, for ``Cut.attributes``; the scope's first."""
    owners = enumerate(attribute_owners(scope))
    return [
        (index, name)
        for index, owner in owners
        for name, value in vars(owner).items()
        if type(value) is int and value > 1 and value % degree == 0
    ]


def attribute_name(scope: nn.Module, attribute: tuple[int, str]) -> str:
    """Return an attribute's name, relative to its scope: ``num_heads`` or ``inner.num_heads``."""
    index, name = attribute
    owner = attribute_owners(scope)[index]
    path = next(path for path, each in scope.named_modules() if each is owner)
    return f"{path}.{name}" if path else name


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.dtype.is_floating_point)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _add(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if total is None else total if new is None else total + new


def _slice(tensor: Tensor, rank: int, degree: int, parts: int = 1) -> Tensor:
    """Return a rank's slice of each of the equal parts of the last dimension."""
    return torch.cat([part.chunk(degree, -1)[rank] for part in tensor.chunk(parts, -1)], -1)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return numbers and texts of a module, and which tensors it has in which version."""
    values = vars(module) | module._buffers
    state = {name: value for name, value in values.items() if isinstance(value, ATOMS)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return state | {name: (id(value), value._version) for name, value in tensors.items()}


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[:-1].numel()


def _gather(tensors: Sequence[Tensor], is_flat: bool, padding: float = 0.5) -> Tensor:
    """Return the ranks' rows one below the other; flat ones have two dimensions, and padding after each rank's."""
    if not is_flat:
        return torch.cat([each.detach() for each in tensors])
    rows = [each.detach().reshape(-1, each.shape[-1]) for each in tensors]
    return torch.cat([part for each in rows for part in (each, each.new_full((PADDING_ROWS, each.shape[1]), padding))])


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [_map_tensors(each, function) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: _map_tensors(each, function) for key, each in value.items()}
    return value


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, nn.Module | ATOMS) or depth == 0:
        return False
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    inner += list(getattr(value, "__dict__", {}).values())
    return any(_holds_tensors(each, depth - 1) for each in inner) or any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(value)
    )
