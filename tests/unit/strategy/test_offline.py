"""``lightning_osdp.plan``: a plan from Python in one process, without training."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, Timer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_osdp
from lightning_osdp import ConfigurationError, ExecutionPlan, InfeasibleError, OSDPCallback, OSDPStrategy, OSDPWarning
from tests.support.modules import GPTModule, loader

HARDWARE = "2xtitan-rtx-pcie3+10gbit"


def plan_for_hardware(module: pl.LightningModule, data: Any = None, **options: Any) -> ExecutionPlan:
    return lightning_osdp.plan(module, data, hardware=HARDWARE, devices=2, max_batch_size=8, **options)


def test_plan_for_hardware_fits_the_limit_and_leaves_the_module() -> None:
    module = GPTModule()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    plan = plan_for_hardware(module, loader(32, 2), memory_limit="60MiB")
    assert plan.cluster.ranks == 2
    assert plan.predicted.max_memory_bytes <= 60 << 20
    assert module._trainer is None
    assert module.losses == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_plan_leaves_module_and_data_with_their_trainer() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(32, 4)

        val_dataloader = train_dataloader

    module, data = GPTModule(), Data()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", devices=1, limit_val_batches=0, **quiet)
    trainer.fit(module, datamodule=data)
    plan_for_hardware(module, data)
    assert module.trainer is trainer
    assert data.trainer is trainer
    fresh = Data()
    plan_for_hardware(GPTModule(), fresh)
    assert fresh.trainer is None


def test_plan_of_another_object_than_a_module_names_it() -> None:
    module: Any = nn.Linear(2, 2)
    with pytest.raises(
        ConfigurationError, match=r"plan\(\) takes a LightningModule, not Linear: Linear\(in_features=2"
    ):
        plan_for_hardware(module, loader(32, 4))


def test_plan_on_this_machine_for_one_device_measures_it(tmp_path: Path) -> None:
    plan = lightning_osdp.plan(GPTModule(), batch_size=2, cache="", trial_steps=False)
    assert (plan.cluster.ranks, plan.batch_size) == (1, 2)
    assert plan.predicted.step_time_s > 0


def test_plan_takes_data_module_and_trainer_args() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(32, 4)

        def val_dataloader(self) -> Any:
            return loader(8, 4)

    args = {"accumulate_grad_batches": 2, "accelerator": "cpu"}
    plan = plan_for_hardware(GPTModule(), Data(), batch_size=4, trainer_args=args)
    assert (plan.batch_size, plan.accumulate_grad_batches, plan.global_batch_size) == (4, 2, 16)


def test_plan_for_hardware_keeps_batch_size_of_loader() -> None:
    plan = plan_for_hardware(GPTModule(), loader(32, 4), batch_size="keep")
    assert plan.batch_size == 4
    plan = plan_for_hardware(GPTModule(), loader(32, 4), global_batch_size="keep", trainer_args={"callbacks": Timer()})
    assert plan.global_batch_size == 8


def test_plan_of_fixed_batch_size_above_its_maximum_names_both() -> None:
    words = "batch_size='keep' is 16 per device, more than max_batch_size=8: give one of both"
    with pytest.raises(ConfigurationError, match=words):
        plan_for_hardware(GPTModule(), loader(32, 16), batch_size="keep")


@pytest.mark.parametrize(("min_steps", "largest"), [(4, 5), (1, 8), (100, 2)])
def test_plan_for_hardware_leaves_an_epoch_its_steps(min_steps: int, largest: int) -> None:
    plan = plan_for_hardware(GPTModule(), loader(32, 2), min_steps_per_epoch=min_steps)
    assert max(point.batch_size for point in plan.frontier) == largest


def test_plan_has_room_for_largest_of_sampled_batches() -> None:
    short, long = (torch.zeros(2, length, dtype=torch.long) for length in (4, 12))

    class Batches(DataLoader[Any]):
        def __iter__(self) -> Any:
            yield from ([short], [short], [long])

    def peak_bytes(**options: Any) -> int:
        data = Batches(TensorDataset(torch.zeros(6)), batch_size=2)
        return plan_for_hardware(GPTModule(), data, batch_size=2, **options).predicted.max_memory_bytes

    assert peak_bytes(sample_batches=1) < peak_bytes() == peak_bytes(sample_batch=[long])


def test_plan_counts_weights_in_the_precision_of_training_and_leaves_the_module() -> None:
    module = GPTModule()
    module.register_buffer("scale", torch.ones(1))

    def peak_bytes(precision: str) -> int:
        args = {"precision": precision}
        plan = lightning_osdp.plan(module, hardware="h100-80gb-nvlink", devices=1, batch_size=2, trainer_args=args)
        return plan.predicted.peak_memory_bytes

    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert peak_bytes("bf16-true") == pytest.approx(peak_bytes("32-true") / 2, rel=0.01)
    assert module.dtype == torch.float32
    for name, value in module.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_plan_where_gradients_are_off_is_that_of_training(no_gradients: Callable[[], Any]) -> None:
    expected = plan_for_hardware(GPTModule())
    with no_gradients():
        found = plan_for_hardware(GPTModule())
        assert not torch.is_grad_enabled()
    assert found.operators == expected.operators
    assert found.predicted == expected.predicted


def test_plan_with_callback_keeps_its_constraints() -> None:
    callback = OSDPCallback(activation_checkpointing=True)
    assert plan_for_hardware(GPTModule(), callback=callback).recomputed
    assert plan_for_hardware(GPTModule(), trainer_args={"callbacks": [Timer(), callback]}).recomputed
    assert not plan_for_hardware(GPTModule()).recomputed


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"devices": 2}, ConfigurationError, "links between 2 devices are not known"),
        ({"hardware": HARDWARE, "devices": 0}, ConfigurationError, "devices=0 is not a positive whole number"),
        ({"memory_limits": "1GiB"}, ConfigurationError, "memory_limits"),
        ({"hardware": "abacus"}, ConfigurationError, "no hardware is called 'abacus'"),
        ({"hardware": HARDWARE, "memory_limit": "10KiB"}, InfeasibleError, "nothing fits.*What would fit: "),
        ({"hardware": HARDWARE, "trainer_args": {"precision": "bf16-mixed"}}, ConfigurationError, "for 'bf16'"),
        ({"hardware": 3}, ConfigurationError, "^hardware takes the name of a hardware or .*, not int: 3$"),
        ({"hardware": HARDWARE, "cluster": "c.json"}, ConfigurationError, "^hardware and cluster both say"),
        (
            {"trainer_args": {"accelerator": "tpu"}},
            ConfigurationError,
            "^accelerator='tpu': there is no such device here",
        ),
        ({"memory_limit": "9" * 400}, ConfigurationError, "9999 is more memory than any device has"),
        ({"data": 3}, ConfigurationError, "^train data are a LightningDataModule, .*, not int: 3$"),
        ({"data": "train.csv"}, ConfigurationError, "^train data are .*, not str: 'train.csv'$"),
        ({"data": pl.LightningDataModule}, ConfigurationError, "^train data are .*, not type: <class "),
        ({"data": []}, ConfigurationError, "^the train dataloader is empty$"),
        ({"data": [["text"]]}, ConfigurationError, "number of samples in a batch .* is a list: \\['text'\\]$"),
        ({"sample_batch": [torch.zeros(0, 8)]}, ConfigurationError, "^the number of samples in a batch can't be told"),
        ({"callback": Timer()}, ConfigurationError, "^callback takes an OSDPCallback, not Timer: "),
        ({"callback": OSDPCallback}, ConfigurationError, "^callback takes an OSDPCallback, not type: "),
        (
            {"callback": OSDPCallback(), "trainer_args": {"callbacks": [OSDPCallback(modes="dp")]}},
            ConfigurationError,
            "^the Trainer has 2 OSDPCallbacks",
        ),
        ({"trainer_args": ["precision"]}, ConfigurationError, "^trainer_args takes a dict .*, not list: "),
        ({"trainer_args": {"callbacks": 3}}, ConfigurationError, "^trainer_args.'callbacks'. takes callbacks, not int"),
        ({"trainer_args": {"precison": "16"}}, ConfigurationError, "^trainer_args: .*: TypeError: .*'precison'"),
        ({"trainer_args": {"devices": 4}}, ConfigurationError, "^trainer_args: devices is not read. plan.. itself"),
        ({"trainer_args": {"strategy": OSDPStrategy()}}, ConfigurationError, "^trainer_args: strategy is not read"),
        ({"trainer_args": {"accumulate_grad_batches": 0}}, ConfigurationError, "^accumulate_grad_batches=0 is not"),
    ],
)
def test_plan_of_bad_input_says_what_is_wrong(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lightning_osdp.plan(GPTModule(), **options)


@pytest.mark.parametrize(
    ("inner", "trainer_args", "words"),
    [
        (lambda: nn.LazyLinear(8), {}, "^model.0.weight .LazyLinear. has no shape before a first batch"),
        (lambda: nn.Embedding(8, 8, sparse=True), {}, "^model.0 .Embedding. has sparse=True"),
        (lambda: nn.Linear(8, 8), {"callbacks": ModelPruning("l1_unstructured")}, "^ModelPruning puts masked copies"),
        (lambda: nn.Linear(8, 8), {"precision": "64-true"}, "^precision='64-true' is not supported"),
    ],
    ids=["lazy", "sparse", "pruning", "double"],
)
def test_plan_for_hardware_refuses_what_training_refuses(
    inner: Callable[[], nn.Module], trainer_args: dict[str, Any], words: str
) -> None:
    module = GPTModule()
    module.model = nn.Sequential(inner())  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=words):
        plan_for_hardware(module, trainer_args=trainer_args)


class LargeInConfigureModel(pl.LightningModule):
    """Seven billion parameters, which are made where Lightning teaches to make large models."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            blocks = [nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192)) for _ in range(13)]
            self.net = nn.Sequential(*blocks)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(64, 8192)), batch_size=2)


def test_plan_of_model_built_in_configure_model_takes_no_memory_for_it() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = lightning_osdp.plan(LargeInConfigureModel(), hardware="h100-80gb-nvlink", devices=8, max_batch_size=4)
    assert plan.model.num_parameters > 6.9e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (1 << 20)  # KiB: less than 1 GiB more


class SmallInConfigureModel(LargeInConfigureModel):
    """Its layers are made with weights of its own, and where ``reads`` is set it asks for a tensor's value."""

    reads = False

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)] if self.reads else []
            self.net = nn.Sequential(nn.Linear(8192, 2))
            nn.init.ones_(self.net[0].weight)


def test_plan_takes_away_what_configure_model_has_built_without_values() -> None:
    module = SmallInConfigureModel()
    lightning_osdp.plan(module, hardware="h100-80gb-nvlink", devices=2, batch_size="keep")
    assert not list(module.parameters())
    module.configure_model()
    assert bool((module.net[0].weight == 1.0).all())


def test_plan_of_configure_model_that_reads_values_says_what_to_do() -> None:
    module = SmallInConfigureModel()
    module.reads = True
    with pytest.raises(
        ConfigurationError, match=r"configure_model reads values .* torch.linspace\(\.\.\., device='cpu'\)"
    ):
        lightning_osdp.plan(module, hardware="h100-80gb-nvlink", devices=2, batch_size="keep")


def test_str_of_plan_is_its_table_and_notebooks_show_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for_hardware(GPTModule(), batch_size=2)
    assert "step time" in str(plan)
    assert "operators" in str(plan)
    assert str(plan._repr_html_()).startswith("<iframe srcdoc=")
    monkeypatch.setitem(sys.modules, "lightning_osdp.report.html", None)
    assert str(plan._repr_html_()).startswith("<pre>")


def test_plan_says_where_an_argument_of_the_trainer_is_given() -> None:
    words = r"plan\(\) takes no 'precision': .* trainer_args=\{'precision': \.\.\.\}"
    with pytest.raises(ConfigurationError, match=words):
        lightning_osdp.plan(GPTModule(), precision="bf16-mixed")


def test_plan_for_hardware_takes_the_type_of_the_parameters_where_no_precision_is_given() -> None:
    def compute_s(module: pl.LightningModule, hardware: str) -> float:
        plan = lightning_osdp.plan(module, hardware=hardware, devices=1, batch_size=256)
        return plan.predicted.compute_time_s

    half = GPTModule().bfloat16()
    assert compute_s(half, "rtx-4090-pcie4") < compute_s(GPTModule(), "rtx-4090-pcie4")
    words = "^the parameters are bf16, which NVIDIA TITAN RTX does not compute in: the times of .* are those of fp32$"
    with pytest.warns(OSDPWarning, match=words):
        compute_s(half, "titan-rtx-pcie3")
