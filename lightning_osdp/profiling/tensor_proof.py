"""Plays the ranks of a tensor parallel group in one process, to prove that linear layers may be cut.

Some column operators feed a row operator. Each rank is to hold a slice of the columns' output features and of the row's
input features, and runs the code in between for the rows of all ranks. That is right if what reaches the row on each
rank is a slice of what reaches it without a cut, for whatever the columns give; and the same backward. So no weights
are needed: the columns give random numbers, from which every slice follows, and nothing runs after the row.

Ranks get different inputs, once also other numbers of samples. Numbers are random, in float64 where the module can do
that, so that nothing in between can hide behind zeros; and dropout multiplies by its mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.engine.tensor_parallel.scope import map_tensors
from lightning_osdp.profiling.tensor_stage import ATOMS, PlayedModule, Refusal, Scene, attribute_owners

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5}
"""Largest difference from the module without a cut, relative to the largest number of a row. Modules compute some
things in float32 whatever they are given."""

NUM_INPUTS = 3
"""Random inputs that each cut is tried with; in the last, rows differ in scale by up to 10,000."""

UNEVEN_INPUT = 1
"""Input of which every second rank has twice as many samples, if the module can run with so many."""

MAX_ROW_SOURCES = 4
"""Ranks whose rows are gathered; a group of more has no other kind of row."""

PADDING_ROWS = 2
"""Rows that are appended to those of each rank where rows are flattened, as ranks with fewer rows do."""


@dataclass(frozen=True)
class Cut:
    """A way to cut: over how many ranks, in how many parts of a fused projection, dividing which attributes."""

    degree: int
    parts: int = 1
    attributes: tuple[tuple[int, str], ...] = ()
    """Modules, by their index in ``attribute_owners``, and names."""


@dataclass
class PlayedRun:
    """One run up to the row operator, and its gradients."""

    reached: Tensor
    """Input of the row operator."""
    random_outputs: list[Tensor]
    """Random parts of what the columns gave."""
    inputs: list[Tensor]
    """Inputs of the columns, or tensor arguments of the scope."""
    column_inputs: list[Tensor]
    cotangent: Tensor | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients of ``random_outputs``, of ``inputs`` and of the parameters."""


class PlayedGroup(PlayedModule):
    """Plays the ranks of a group with cuts; arguments as of ``PlayedModule``."""

    def __init__(self, scene: Scene, dtype: torch.dtype, long_dim: int = 0, true_mask: bool = True) -> None:
        """Copy the module, and run it once without a cut."""
        super().__init__(scene, dtype, long_dim, true_mask)
        self._plain_runs: dict[tuple[int, int], PlayedRun] = {}
        self._can_differ = True
        self.plain_run(0, 0)
        try:
            self.plain_run(1, UNEVEN_INPUT)
        except Refusal:  # it knows how many samples there are: neither can ranks have other numbers of them
            self._can_differ = False

    def plain_run(self, rank: int, seed: int) -> PlayedRun:
        """Return what a rank does without any cut."""
        if (rank, seed) in self._plain_runs:
            return self._plain_runs[rank, seed]
        generator = torch.Generator().manual_seed(77 + 1000 * seed + rank)
        random_outputs: list[Tensor] = []
        column_inputs: list[Tensor] = []
        leaves = _Replacements(_leaf)

        def on_column(index: int, x: Tensor) -> Tensor:
            x = x if self._scope is not None else leaves.get(x)
            _, right = self._columns[index]._vectors
            product = self._random(*x.shape[:-1], len(right), generator=generator)
            if seed == NUM_INPUTS - 1:
                product *= 10 ** (4 * torch.rand(*x.shape[:-1], 1, dtype=self.dtype, generator=generator) - 2)
            random_outputs.append(_leaf(product))
            column_inputs.append(x.detach())
            return self._product(index, x, right) + random_outputs[-1]

        self._on_column = on_column
        self._on_scope = lambda args, kwargs: map_tensors((args, kwargs), leaves.get)
        before = [_state_of(each) for each in self._stateless]
        times = 2 if self._can_differ and seed == UNEVEN_INPUT and rank % 2 else 1
        run = PlayedRun(self._run(rank, seed, times), random_outputs, leaves.values, column_inputs)
        for each, state in zip(self._stateless, before, strict=True):
            if _state_of(each) != state:
                raise Refusal(f"{type(each).__name__} changes its own state")
        run.cotangent = self._random(*run.reached.shape, generator=generator)
        self._differentiate(run)
        self._check_alive(run, is_first=(rank, seed) == (0, 0))
        self._plain_runs[rank, seed] = run
        return run

    def _differentiate(self, run: PlayedRun) -> None:
        if not run.reached.requires_grad:
            raise Refusal("no gradient goes through it")
        wanted = [*run.random_outputs, *(each for each in run.inputs if each.requires_grad), *self._parameters]
        assert run.cotangent is not None
        try:
            gradients = torch.autograd.grad(run.reached, wanted, run.cotangent.to(run.reached.dtype), allow_unused=True)
        except RuntimeError as error:
            raise Refusal(str(error).split("\n")[0][:100]) from error
        run.gradients = list(gradients)

    def _check_alive(self, run: PlayedRun, is_first: bool) -> None:
        """Refuse runs that prove nothing, because most of what flows is zero or no number."""
        for tensor in (run.reached, *run.gradients[: len(run.random_outputs)]):
            if tensor is None or not tensor.isfinite().all():
                raise Refusal(
                    "random inputs give no finite numbers" if tensor is not None else "no gradient reaches it"
                )
            is_alive = tensor.reshape(-1, tensor.shape[-1]).ne(0).any(0)
            if is_first and is_alive.double().mean() < 0.5:
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

    def _check_layout(self, cut: Cut, plain: list[PlayedRun], seed: int, is_flat: bool) -> None:
        features = {len(self._columns[i]._vectors[1]) for i in range(len(self._columns))}
        if any(size % (cut.degree * cut.parts) for size in features) or plain[0].reached.shape[-1] % cut.degree:
            raise Refusal(f"{cut.degree} does not divide its features")
        gather = functools.partial(_gather, is_flat=is_flat)
        expected = gather([run.reached for run in plain])
        cotangent = gather([_given(run.cotangent) for run in plain], padding=0.0)
        num_products = len(plain[0].random_outputs)
        sums: list[Tensor | None] = [None] * (len(plain[0].gradients) - num_products)
        random_outputs = [gather([run.random_outputs[i] for run in plain]) for i in range(num_products)]
        for rank in range(cut.degree):
            played = self._played_run(cut, rank, plain, random_outputs, seed, is_flat)
            self._compare(played.reached, _slice(expected, rank, cut.degree), is_flat, plain)
            played.cotangent = _slice(cotangent, rank, cut.degree)
            self._differentiate(played)
            for i in range(num_products):
                whole = gather([_given(run.gradients[i]) for run in plain], padding=0.0)
                own = played.gradients[i]
                self._compare(own, _slice(whole, rank, cut.degree, cut.parts), is_flat, plain)
            sums = [_add(total, new) for total, new in zip(sums, played.gradients[num_products:], strict=True)]
        self._compare_sums(sums, plain, num_products, is_flat)

    def _compare_sums(self, sums: Sequence[Tensor | None], plain: list[PlayedRun], begin: int, is_flat: bool) -> None:
        """Compare gradients of inputs and parameters, which the ranks of the group have in parts."""
        inputs = [[each for each in run.inputs if each.requires_grad] for run in plain]
        for index, total in enumerate(sums):
            own = [run.gradients[begin + index] for run in plain]
            known = [each for each in own if each is not None]
            if not known:
                if total is not None and total.abs().max() > 0:
                    raise Refusal("it has a gradient that the module does not have without a cut")
                continue
            if index < len(inputs[0]) and self._is_gathered(inputs[0][index]):
                pairs = zip(own, (each[index] for each in inputs), strict=True)
                parts = [torch.zeros_like(given) if each is None else each for each, given in pairs]
                self._compare(total, _gather(parts, is_flat, padding=0.0), is_flat, plain)
            else:
                self._compare(total, functools.reduce(torch.add, known), False, plain)

    def _is_gathered(self, tensor: Tensor) -> bool:
        return self._scope is None or (tensor.dim() > 0 and tensor.shape[0] == self.scene.batch_rows)

    def _played_run(
        self, cut: Cut, rank: int, plain: list[PlayedRun], random_outputs: Sequence[Tensor], seed: int, is_flat: bool
    ) -> PlayedRun:
        """Run a rank of a group, up to the row operator."""
        own = plain[rank % len(plain)]
        slices: list[Tensor] = []
        gathered = [self._gather_input([run.inputs[i] for run in plain], is_flat) for i in range(len(own.inputs))]
        unused = iter(gathered)

        def next_input(_: Tensor) -> Tensor:
            for tensor in unused:
                return tensor
            raise Refusal("it is called in different ways")

        leaves = _Replacements(next_input)

        def on_column(index: int, x: Tensor) -> Tensor:
            if len(slices) >= len(random_outputs):
                raise Refusal("it runs more than once")
            if self._scope is None:
                x = leaves.get(x)
            else:
                self._compare(x, torch.cat([run.column_inputs[len(slices)] for run in plain]), False, plain)
            _, right = self._columns[index]._vectors
            slices.append(_leaf(_slice(random_outputs[len(slices)], rank, cut.degree, cut.parts)))
            return self._product(index, x, _slice(right, rank, cut.degree, cut.parts)) + slices[-1]

        self._on_column = on_column
        self._on_scope = lambda args, kwargs: map_tensors((args, kwargs), leaves.get)
        with _DividedAttributes(self.attribute_owners, cut):
            reached = self._run(rank % len(plain), seed)
        return PlayedRun(reached, slices, gathered, [])

    def _gather_input(self, tensors: Sequence[Tensor], is_flat: bool) -> Tensor:
        if self._is_gathered(tensors[0]):
            return _leaf(_gather(tensors, is_flat))
        if not all(torch.equal(tensors[0], each) for each in tensors):
            raise Refusal("an argument without a row for each sample differs between ranks")
        return _leaf(tensors[0])

    def _compare(self, found: Tensor | None, expected: Tensor, is_flat: bool, plain: list[PlayedRun]) -> None:
        """Refuse a difference, but for the rows of padding."""
        if found is None or found.shape != expected.shape:
            shape = None if found is None else tuple(found.shape)
            raise Refusal(f"a rank's part has the shape {shape} instead of {tuple(expected.shape)}")
        found, expected = found.detach(), expected.detach()
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


class _Replacements:
    """What takes the place of tensors: the same for a tensor that is seen again."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        self._replace = replace
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor as well: no other gets its id while it lives

    def get(self, tensor: Tensor) -> Tensor:
        """Return what takes the place of ``tensor``."""
        if id(tensor) not in self._pairs:
            self._pairs[id(tensor)] = (tensor, self._replace(tensor))
        return self._pairs[id(tensor)][1]

    @property
    def values(self) -> list[Tensor]:
        """All that took the place of a tensor, in the order of the tensors."""
        return [new for _, new in self._pairs.values()]


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


def attribute_values(scope: nn.Module, attributes: Sequence[tuple[int, str]]) -> tuple[int, ...]:
    """Return the numbers of attributes of a scope."""
    owners = attribute_owners(scope)
    return tuple(vars(owners[index]).get(name, 0) for index, name in attributes)


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
