"""Steps on a copy of the module: how they are timed, and that the module shares its values with the copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_osdp.autotune import trial_step
from lightning_osdp.autotune.trial_step import StepTiming
from lightning_osdp.profiling.tracing.stand_ins import lazy_clone, lazy_clone_bytes
from tests.support.trials import ALONE, BATCH, CPU, Module, make_trial_context


@pytest.mark.parametrize(("known_s", "steps"), [(0.1, 8), (1.0, 1 + trial_step.MAX_STEPS)])
def test_time_release_and_retain_reuses_known_time_of_slow_step(
    known_s: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    step = trial_step._forward_backward
    monkeypatch.setattr(trial_step, "_forward_backward", lambda *arguments: made.append(1) or step(*arguments))
    known = StepTiming(known_s, page_faults=10_000)
    usual, kept = trial_step.time_release_and_retain(make_trial_context(Module()), 2, ALONE, 1 << 20, known)
    assert len(made) == steps
    assert (usual == known) == (known_s == 1.0)
    assert kept.step_s > 0
    assert trial_step.release_and_retain_duration_s(known) == pytest.approx({0.1: 8 * 0.1, 1.0: 2 * 1.0}[known.step_s])


class Immovable(Module):
    """Its own ``to`` fails."""

    def to(self, *_: Any, **__: Any) -> Any:
        raise TypeError("it stays where it is")


class Ungraded(Module):
    """Its own ``zero_grad`` fails."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        raise KeyError("no gradients")


@pytest.mark.parametrize(("kind", "text"), [(Immovable, "TypeError: it stays"), (Ungraded, "KeyError: 'no gradients'")])
def test_error_in_methods_of_the_module_is_a_trial_error(kind: type[Module], text: str) -> None:
    with pytest.raises(trial_step.TrialError, match=text):
        trial_step.time_step(make_trial_context(kind()), [2], ALONE, None, 0.0)


class OneGradient(Module):
    """Fails as soon as there are gradients of two parameters."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.count)
        super().backward(loss, *args, **kwargs)

    def count(self, _: torch.Tensor) -> None:
        if sum(one.grad is not None for one in self.parameters()) > 1:
            raise ValueError("two gradients")


def test_time_step_frees_each_gradient_as_soon_as_it_is_made_if_asked() -> None:
    with pytest.raises(trial_step.TrialError, match="two gradients"):
        trial_step.time_step(make_trial_context(OneGradient()), [2], ALONE, None, 0.0)
    found = trial_step.time_step(make_trial_context(OneGradient()), [2], ALONE, None, 0.0, frees_gradients=True)
    assert found[2].step_s > 0


def test_own_faults_in_a_trial_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("a fault of the library")

    monkeypatch.setattr(trial_step, "_put_on_device", fail)
    with pytest.raises(AttributeError, match="a fault of the library"):
        trial_step.time_step(make_trial_context(Module()), [2], ALONE, None, 0.0)


def test_lazy_clone_shares_parameters_until_either_is_written() -> None:
    module = Module()
    twin = lazy_clone(module)
    weights, theirs = (dict(one.named_parameters()) for one in (module, twin))
    before = {name: value.detach().clone() for name, value in weights.items()}
    twin.net(BATCH).sum().backward()
    assert all(map(torch._C._is_cow_tensor, theirs.values()))
    assert lazy_clone_bytes(module, CPU) == sum(buffer.nbytes for buffer in module.buffers())
    with torch.no_grad():
        theirs["net.0.weight"].data.zero_()
        weights["net.3.weight"].fill_(2.0)
    assert torch.equal(weights["net.0.weight"], before["net.0.weight"])
    assert torch.equal(theirs["net.3.weight"], before["net.3.weight"])


def test_lazy_clone_copies_tensors_that_cannot_be_shared() -> None:
    module = Module()
    module.net[0].weight = nn.Parameter(torch.from_numpy(np.ones((128, 64), dtype=np.float32)))  # numpy's memory
    module.body = nn.LSTM(64, 32)  # its backward asks for weights to write to
    own = [module.net[0].weight, *module.body.parameters(), *module.buffers()]
    assert lazy_clone_bytes(module, CPU) == sum(tensor.nbytes for tensor in own)
    twin = lazy_clone(module)
    assert torch.equal(twin.net[0].weight, module.net[0].weight)
    assert twin.net[0].weight.data_ptr() != module.net[0].weight.data_ptr()


class _Clock:
    """Time that passes by what steps say they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.turns: dict[int, int] = {}
        monkeypatch.setattr(trial_step, "record_event", lambda _: self.now_s)

    def step(self, name: int, *takes_s: float) -> Any:
        """A step that takes these times, one after the other, and the last of them from then on; a quarter of each for
        the forward pass."""

        def run() -> float:
            turn, start_s = self.turns.get(name, 0), self.now_s
            self.turns[name] = turn + 1
            took_s = takes_s[min(turn, len(takes_s) - 1)]
            self.now_s += took_s
            return start_s + took_s / 4

        return run


def test_time_repeats_on_cpu_warms_up_only_first_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    steps = [clock.step(2, 1.0, 0.75), clock.step(8, 2.25)]
    took = trial_step._time_repeats(steps, ALONE, torch.device("cpu"), duration_s=1.5)
    assert [one.step_s for one in took] == [0.75, 2.25]
    assert [one.forward_s for one in took] == [0.75 / 4, 2.25 / 4]
    assert clock.turns == {2: 2, 8: 1}


def test_time_repeats_on_cuda_warms_up_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_step, "synchronize", lambda _: None)
    clock = _Clock(monkeypatch)
    steps = [clock.step(2, 1.0, 0.25), clock.step(8, 2.0, 0.5, 0.75, 0.5)]
    took = trial_step._time_repeats(steps, ALONE, torch.device("cuda"), duration_s=2.5)
    assert [one.step_s for one in took] == [0.25, 0.5]
    assert clock.turns == {2: 5, 8: 5}


def test_time_repeats_on_cpu_warms_up_single_slow_and_several_fast_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    (single,) = trial_step._time_repeats([clock.step(8, 3.0, 2.0)], ALONE, torch.device("cpu"), duration_s=1.5)
    assert (single.step_s, clock.turns) == (2.0, {8: 2})
    steps = [clock.step(2, 0.25, 0.125), clock.step(4, 0.5, 0.25)]
    assert [one.step_s for one in trial_step._time_repeats(steps, ALONE, torch.device("cpu"), duration_s=1.5)] == [
        0.125,
        0.25,
    ]


def test_trial_context_of_manual_compiled_or_meta_module_is_not_repeatable() -> None:
    module = Module()
    assert make_trial_context(module).is_repeatable
    module.automatic_optimization = False
    assert not make_trial_context(module).is_repeatable
    module = Module()
    module.net = torch.compile(module.net, backend="eager")
    assert not make_trial_context(module).is_repeatable
    with torch.device("meta"):
        assert not make_trial_context(Module()).is_repeatable
