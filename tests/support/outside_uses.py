"""What users do with parameters outside of their operators' forward: between steps, in hooks, and elsewhere in a step.

Each use runs in a small training, by plain PyTorch and under plans; what it notes and the weights in the end are the
same, or it is refused with one sentence.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

IN, HIDDEN, ITEMS = 6, 9, 7


class Encoder(nn.Module):
    """Two layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A student, a teacher that is never trained by gradients, and items."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Encoder(), Encoder().requires_grad_(False)
        self.items = nn.Embedding(ITEMS, IN)

    def loss(self, x: Tensor) -> Tensor:
        ids = (x[:, 0].abs() * 10).long() % ITEMS
        hidden = self.student(x) + self.items(ids)
        with torch.no_grad():
            target = self.teacher(x)
        return functional.mse_loss(hidden, target) + hidden.square().mean()


class Use:
    """Does nothing. ``note`` collects what is compared."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.noted: list[Any] = []

    def make_optimizer(self, model: Model) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return self.optimizer

    def note(self, value: Any) -> None:
        self.noted.append(value.detach().clone() if isinstance(value, Tensor) else value)

    def loss(self, x: Tensor, step: int) -> Tensor:
        return self.model.loss(x)

    def after_backward(self, step: int) -> None:
        """With gradients."""

    def after_step(self, step: int) -> None:
        """Between steps."""

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.model.teacher.parameters(), self.model.student.parameters(), strict=True))


class TeacherInPlace(Use):
    def after_step(self, step: int) -> None:
        for teacher, student in self.pairs:
            teacher.data.mul_(0.8).add_(student.data, alpha=0.2)


class TeacherAssigned(Use):
    def after_step(self, step: int) -> None:
        for teacher, student in self.pairs:
            teacher.data = teacher.data * 0.8 + student.data * 0.2


class TeacherLerp(Use):
    @torch.no_grad()
    def after_step(self, step: int) -> None:
        for teacher, student in self.pairs:
            teacher.lerp_(student, 0.2)


class TeacherCopied(Use):
    def after_step(self, step: int) -> None:
        for teacher, student in self.pairs:
            teacher.data.copy_(student.data)


class TeacherForEach(Use):
    @torch.no_grad()
    def after_step(self, step: int) -> None:
        teachers, students = ([*p] for p in zip(*self.pairs, strict=True))
        torch._foreach_lerp_(teachers, students, 0.2)
        torch._foreach_mul_([p.data for p in teachers], 0.9)
        torch._foreach_add_(teachers, [p.detach() for p in students], alpha=0.1)


class TeacherByStateDict(Use):
    def after_step(self, step: int) -> None:
        for ours, theirs in zip(
            self.model.teacher.state_dict().values(), self.model.student.state_dict().values(), strict=True
        ):
            ours.copy_(0.8 * ours + 0.2 * theirs)


class Averaged(Use):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.mean = AveragedModel(model)
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def after_step(self, step: int) -> None:
        for average in (self.mean, self.ema):
            average.update_parameters(self.model)
            for parameter in average.parameters():
                self.note(parameter)


class SwappedAverage(Use):
    """The class that circulates for EMA: shadow weights that take the place of the model's while it is evaluated."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def after_step(self, step: int) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = (0.5 * p.data + 0.5 * self.shadow[name]).clone()
        backup = {}
        for name, p in self.model.named_parameters():
            backup[name] = p.data
            p.data = self.shadow[name]
        self.note(self.model.loss(torch.ones(2, IN)))
        for name, p in self.model.named_parameters():
            p.data = backup[name]
        self.note(self.model.loss(torch.ones(2, IN)))


class ItemScores(Use):
    @torch.no_grad()
    def after_step(self, step: int) -> None:
        self.model.eval()
        scores = self.model.student(torch.ones(2, IN)) @ self.model.items.weight.T
        self.note(scores)
        self.note(torch.topk(functional.normalize(self.model.items.weight, dim=1)[:, 0], 3).values)
        self.note(torch.einsum("if,jf->ij", self.model.items.weight, self.model.items.weight))
        self.model.train()


class LatePenalty(Use):
    def loss(self, x: Tensor, step: int) -> Tensor:
        model = self.model
        before = model.student.up.weight.pow(2).sum() if step >= 2 else 0.0
        loss = model.loss(x) + 0.01 * before
        if step >= 1:
            loss = loss + 0.1 * model.student.down.weight.view(-1)[3:20].abs().sum()
            loss = loss + 0.1 * sum(p.norm() for p in model.student.parameters())
        return loss


class LateTie(Use):
    def loss(self, x: Tensor, step: int) -> Tensor:
        loss = self.model.loss(x)
        if step >= 2:
            logits = functional.linear(self.model.student(x), self.model.items.weight)
            loss = loss + functional.cross_entropy(logits, (x[:, 1].abs() * 10).long() % ITEMS)
        return loss


class PenaltyAlone(Use):
    """The gradient of a step comes from a read alone, and of another one from several passes."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        if step % 2:
            self.model.loss(x).backward()
        return self.model.items.weight.square().mean() + self.model.student.up.weight[0].sum()


class Norms(Use):
    def after_backward(self, step: int) -> None:
        for p in self.model.parameters():
            self.note(p.norm())
            if p.grad is not None:
                self.note(p.grad.norm())
                self.note(p.grad.data.norm(1))
                self.note(p.grad.view(-1)[:3])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.note(torch.stack([g.abs().max() for g in gradients]))
        self.note(nn.utils.get_total_norm(gradients))
        self.note(torch.stack(torch._foreach_norm(gradients)))
        self.note(nn.utils.clip_grad_norm_(self.model.parameters(), 0.3))
        nn.utils.clip_grad_value_(self.model.parameters(), 0.02)


class GradientsChanged(Use):
    def after_backward(self, step: int) -> None:
        up, down = self.model.student.up.weight, self.model.student.down.weight
        up.grad.mul_(0.5)
        up.grad[0] = 0.25
        down.grad = down.grad + 0.01 * torch.arange(down.numel()).view_as(down)
        down.grad += 0.1
        self.model.items.weight.grad.data.clamp_(-0.01, 0.01)
        assert up.grad is up.grad


class UpdatedByHand(Use):
    def after_backward(self, step: int) -> None:
        for p in self.model.student.parameters():
            p.data.add_(p.grad, alpha=-0.05)
            p.data -= 0.01 * p.grad.sign()
            with torch.no_grad():
                p.sub_(0.05 * p.grad)


class BackwardInHook(Use):
    """A backward pass between steps, whose gradients are read and applied at once."""

    def after_step(self, step: int) -> None:
        for scale in (1.0, 0.5):
            self.model.loss(torch.linspace(-scale, scale, 3 * IN).view(3, IN)).backward()
        for p in self.model.parameters():
            if p.requires_grad:
                self.note(p.grad)
                with torch.no_grad():
                    p.sub_(0.05 * p.grad)
        self.model.zero_grad()


class Reinitialised(Use):
    def after_step(self, step: int) -> None:
        torch.manual_seed(7 + step)
        model = self.model
        nn.init.normal_(model.student.up.weight, std=0.2)
        model.items.weight.data.uniform_(-0.1, 0.1)
        nn.init.orthogonal_(model.teacher.down.weight)
        nn.init.trunc_normal_(model.teacher.up.weight, std=0.1)
        with torch.no_grad():
            model.student.down.weight.bernoulli_(0.5).mul_(0.1)
            model.items.weight[2].normal_()
            nn.init.zeros_(model.teacher.up.bias)


class Pruned(Use):
    def after_step(self, step: int) -> None:
        for layer in (self.model.student.up, self.model.student.down, self.model.items):
            weight = layer.weight
            threshold = weight.abs().flatten().kthvalue(5).values
            weight.data[weight.data.abs() < threshold] = 0.0
            weight.data[:, 1] *= 0.5
            weight.data.view(-1)[-3:].fill_(0.125)
            with torch.no_grad():
                weight[0, :2] = torch.tensor([1.0, 2.0])
                weight.T[3].neg_()
                weight.copy_(torch.where(weight > 1, weight, 0.9 * weight))
            weight.data.clamp_(-1, 1)
            torch.add(weight.data, 0.01, out=weight.data)
            for row in weight.data:
                row.add_(0.001)


class ViewsHeld(Use):
    """Objects that are made once and used for all of training."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.held: list[Tensor] = []

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        model = self.model
        if not self.held:
            self.held = [model.items.weight.data, model.items.weight.T, model.student.up.weight.detach()[0]]
            self.state = model.student.state_dict()
        data, transposed, row = self.held
        data.mul_(0.9)
        self.note(transposed.sum(0))
        transposed[0] = 0.5
        row += 0.25
        self.note(row)
        for value in self.state.values():
            self.note(value.sum())
        self.state["down.weight"].mul_(1.5)


class AsVector(Use):
    def after_step(self, step: int) -> None:
        vector = parameters_to_vector(self.model.student.parameters()).detach()
        self.note(vector)
        vector_to_parameters(0.9 * vector, self.model.student.parameters())


class States(Use):
    def after_step(self, step: int) -> None:
        model = self.model
        for name, value in model.state_dict().items():
            self.note(name)
            self.note(value)
        state = {name: value.clone() for name, value in model.student.state_dict().items()}
        model.teacher.load_state_dict({name: 0.5 * value for name, value in state.items()})
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(value) is Tensor for value in loaded.values())
        self.note(loaded["items.weight"])
        deep = copy.deepcopy(model.items.state_dict())
        self.note(deep["weight"])
        model.items.load_state_dict({"weight": loaded["items.weight"].flip(0)})


class Looks(Use):
    def after_step(self, step: int) -> None:
        p = self.model.student.up.weight
        self.note([p.shape, p.size(1), p.numel(), len(p), p.dim(), p.ndim, p.stride(), p.nbytes, p.is_contiguous()])
        self.note([p.dtype, p.device, p.requires_grad, p.is_leaf, p.grad is None, p.element_size(), p.grad_fn])
        for made in (torch.zeros_like(p), p.new_ones(2), torch.ones_like(p.data), torch.full_like(p, 2)):
            assert type(made) is Tensor
            self.note(made)
        assert isinstance(p, nn.Parameter)
        assert {p: 1}[self.model.student.up.weight] == 1
        assert p.to("cpu") is p
        assert p.float() is p
        assert p.data.shape == (HIDDEN, IN)
        assert torch.equal(p, p)
        assert not torch.equal(p, self.model.student.down.weight)
        self.note(sum(q.numel() for q in self.model.parameters()))
        copied = copy.deepcopy(p)
        assert type(copied) is nn.Parameter
        self.note(copied)
        file = io.BytesIO()
        torch.save({"weight": p, "data": p.data}, file)
        file.seek(0)
        self.note(torch.load(file, weights_only=True)["weight"])
        self.note(p.detach().numpy().sum().item())
        self.note(p.tolist())
        self.note(f"{p.mean():.5f}")
        self.note(p.double())
        repr(p), repr(self.model), repr(p.data)


class Frozen(Use):
    def after_step(self, step: int) -> None:
        self.model.student.down.weight.requires_grad_(step % 2 == 1)
        self.model.items.weight.requires_grad = step < 2


USES: dict[str, Callable[[Model], Use]] = {use.__name__: use for use in Use.__subclasses__()}


def _read_in_worker(model: Model) -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return model.items.weight[index].detach().clone()

        def __len__(self) -> int:
            return ITEMS

    next(iter(torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")))


def _write_to_numpy(model: Model) -> None:
    model.items.weight.detach().numpy()[0] = 1.0


def _write_with_gradients(model: Model) -> None:
    model.items.weight.mul_(2)


def _write_view_with_gradients(model: Model) -> None:
    model.items.weight[0].mul_(2)


def _limit_own_rows(model: Model) -> None:
    functional.embedding(torch.tensor([dist.get_rank()]), model.items.weight, max_norm=0.01)


def _assign(model: Model, value: Tensor) -> None:
    model.items.weight.data = value


SENTENCE = r"weight of items is sharded, and .*: use it within trainer\.strategy\.summon_full_params\(\), on all ranks"
LEAF = "leaf Variable that requires grad"

REFUSALS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "collective on the parameter": (lambda model: dist.broadcast(model.items.weight, 0), "mix up the ranks' parts"),
    "collective on its data": (lambda model: dist.all_reduce(model.items.weight.data), SENTENCE),
    "collective on a view": (lambda model: dist.all_reduce(model.items.weight.detach()[0]), SENTENCE),
    "storage": (lambda model: model.items.weight.untyped_storage(), "untyped_storage needs its memory as a whole"),
    "storage of its data": (lambda model: model.items.weight.data.storage(), SENTENCE),
    "shared memory": (lambda model: model.items.weight.share_memory_(), SENTENCE),
    "a shallow copy": (lambda model: copy.copy(model.items.weight), "a shallow copy would have no memory in common"),
    "a leaf that stands for it": (lambda model: model.items.weight.detach().requires_grad_(), SENTENCE),
    "a parameter that stands for it": (lambda model: nn.Parameter(model.items.weight.data), SENTENCE),
    "data of another shape": (lambda model: _assign(model, torch.zeros(2, IN)), r"data of shape \(2, 6\).*\(7, 6\)"),
    "data of another type": (lambda model: _assign(model, torch.zeros(ITEMS, IN).double()), "float64 on cpu can't"),
    "another type": (lambda model: model.half(), "can't take the place of"),
    "a worker of a DataLoader": (_read_in_worker, "a process of a DataLoader"),
    "changed by numpy": (_write_to_numpy, "read-only"),
    "changed with gradients": (_write_with_gradients, LEAF),
    "rows of each rank limited": (_limit_own_rows, "max_norm changes the rows that a rank looks up"),
    "a view changed with gradients": (_write_view_with_gradients, LEAF),
}
