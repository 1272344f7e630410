"""Damaged, foreign and hostile checkpoints: right values or a CheckpointError, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_osdp.cli.main import main
from lightning_osdp.errors import CheckpointError, OSDPError, ShardingError
from lightning_osdp.state import state_dict as states
from lightning_osdp.state.atomic_files import CHECKSUM_FILE, TRAINER_FILE
from lightning_osdp.state.checked_values import match_optimizer_state
from lightning_osdp.state.checkpoint import CheckpointFormat, consolidate
from lightning_osdp.state.folder_index import ChunkBounds, covers_once
from lightning_osdp.state.state_dict import ShardedParameters
from lightning_osdp.strategy import checkpointing

NO_SHARDS = ShardedParameters({}, None)


def make_module(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.rand(4, 5)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """This process alone is the group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def save(module: nn.Module, optimizer: torch.optim.Optimizer, path: Path, save_format: str, group: Any) -> None:
    checkpoints = CheckpointFormat(save_format)
    with checkpoints.deferred_gathers(True, False):
        deferred = checkpoints.deferred_tensors
        assert deferred is not None
        content = {
            "pytorch-lightning_version": "2.5",
            "state_dict": states.model_state(module, NO_SHARDS, deferred),
            "optimizer_states": [states.optimizer_state(optimizer, NO_SHARDS, names_of(module), 0, deferred)],
        }
        checkpoints.save(content, path, group)


def load(path: Path, group: Any) -> dict[str, Tensor]:
    """What comes into a module with other values, and into its optimizer."""
    module, optimizer = make_module(seed=2)
    checkpoints = CheckpointFormat("full")
    content = checkpoints.load(path, True, group)
    states.load_model_state(module, NO_SHARDS, content["state_dict"], True, checkpoints.fill)
    saved = content["optimizer_states"][0]
    states.load_optimizer_state(optimizer, NO_SHARDS, names_of(module), saved, checkpoints.fill)
    moments = {
        f"{name}.{key}": optimizer.state[parameter][key]
        for parameter, name in names_of(module).items()
        for key in ("exp_avg", "exp_avg_sq", "step")
    }
    return {**module.state_dict(), **moments}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, group: Any) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    module, optimizer = make_module(seed=1)
    for save_format in ("full", "sharded"):
        save(module, optimizer, folder / save_format, save_format, group)
    return folder


@pytest.fixture(scope="module")
def expected(saved: Path, group: Any) -> dict[str, Tensor]:
    return load(saved / "full", group)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def copy_without_checksums(saved: Path, folder: Path) -> Path:
    """The sharded checkpoint as earlier releases saved it."""
    shutil.copytree(saved / "sharded", folder)
    (folder / CHECKSUM_FILE).unlink()
    contents = torch.load(folder / TRAINER_FILE)
    del contents["has_checksums"]
    torch.save(contents, folder / TRAINER_FILE)
    return folder


def test_sharded_checkpoint_loads_equal_values_with_and_without_checksums(
    saved: Path, expected: dict[str, Tensor], group: Any, tmp_path: Path
) -> None:
    assert_equal(load(saved / "sharded", group), expected)
    without = tmp_path / "without"
    shutil.copytree(saved / "sharded", without)
    (without / CHECKSUM_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"there is no checksums\.json in it"):
        load(without, group)
    assert_equal(load(copy_without_checksums(saved, tmp_path / "old"), group), expected)


def test_sharded_checkpoint_is_read_by_torchs_own_tools(
    saved: Path, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    dcp_to_torch_save(saved / "sharded", tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt")
    assert torch.equal(content["state_dict.0.weight"], expected["0.weight"])
    assert FileSystemReader(saved / "sharded").read_metadata().state_dict_metadata


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bit_gives_equal_values_or_checkpoint_error(
    saved: Path, expected: dict[str, Tensor], group: Any, tmp_path: Path, seed: int
) -> None:
    assert flip_a_bit_and_load(saved / "sharded", expected, group, tmp_path / "flipped", seed) in ("equal", "error")


def flip_a_bit_and_load(source: Path, expected: dict[str, Tensor], group: Any, folder: Path, seed: int) -> str:
    chance = random.Random(seed)
    shutil.copytree(source, folder)
    files = sorted(folder.iterdir())
    file = files[seed % len(files)]
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    try:
        found = load(folder, group)
    except CheckpointError as error:
        is_told = f"{file.name} is damaged: its checksum does not match" in str(error)
        return "error" if is_told or file.name == CHECKSUM_FILE else str(error)
    assert_equal(found, expected)
    return "equal"


class _Call:
    """Runs something when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile_objects(trace: Path) -> dict[str, Any]:
    return {
        "system": _Call(os.system, f"touch {trace}"),
        "eval": _Call(eval, f"open({str(trace)!r}, 'w')"),
        "open": _Call(open, str(trace), "w"),
        "torch": _Call(torch.save, 1, str(trace)),
        "nested": {"state": [("x", {1: _Call(os.mkdir, str(trace))})]},
        "getattr": _Call(getattr, Path, "home"),
        "numpy": _Call(__import__("importlib").import_module, "antigravity"),
    }


@pytest.mark.parametrize("kind", list(hostile_objects(Path())))
@pytest.mark.parametrize("name", [".metadata", TRAINER_FILE, "__0_0.distcp", "full"])
def test_code_in_any_file_of_a_checkpoint_is_not_run(
    saved: Path, group: Any, tmp_path: Path, kind: str, name: str
) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "hostile"
    hostile = hostile_objects(trace)[kind]
    if name == "full":
        torch.save({"state_dict": hostile}, folder)
    else:
        copy_without_checksums(saved, folder)
        if name == TRAINER_FILE:
            torch.save({**torch.load(folder / name), "hidden": hostile}, folder / name)
        elif name == ".metadata":
            replace_index(folder, lambda metadata: setattr(metadata, "planner_data", hostile))
        elif name.endswith("distcp"):
            torch.save(hostile, folder / name)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"nothing of it was run|is damaged|more than tensors and plain values"
        ):
            load(folder, group)
    if name != "full":
        with pytest.raises(
            CheckpointError, match=r"nothing of it was run|is damaged|more than tensors and plain values"
        ):
            consolidate(folder, tmp_path / "whole.ckpt", weights_only=True)
        assert main(["consolidate", str(folder), str(tmp_path / "whole.ckpt")]) == 2
    assert not trace.exists()
    assert not (tmp_path / "whole.ckpt").exists()


def test_refused_index_says_what_it_names(saved: Path, group: Any, tmp_path: Path) -> None:
    shutil.copytree(saved / "sharded", tmp_path / "a")
    (tmp_path / "a" / CHECKSUM_FILE).unlink()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(_Call(os.system, "true")))
    with pytest.raises(CheckpointError, match=r"\.metadata is refused, nothing of it was run: it names posix\.system"):
        load(tmp_path / "a", group)


def replace_index(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def lead_out(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../secret"


def drop_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["state_dict.0.weight"].chunks.clear()


def double_chunk(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["state_dict.0.weight"].chunks
    chunks.append(chunks[0])


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["state_dict.0.weight"].properties.dtype = torch.int32


def swap_places(metadata: Any) -> None:
    indices = [index for index in metadata.storage_data if index.fqn in ("state_dict.0.weight", "state_dict.0.bias")]
    places = metadata.storage_data
    places[indices[0]], places[indices[1]] = places[indices[1]], places[indices[0]]


def negative_place(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = -5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lead_out, r"names the file '\.\./secret', which is not in the folder"),
        (drop_chunk, "do not hold each element of state_dict.0.weight once"),
        (double_chunk, "do not hold each element of state_dict.0.weight once"),
        (other_dtype, "differ on state_dict.0.weight"),
        (swap_places, "it holds other tensors than .metadata says"),
        (negative_place, "is damaged: ValueError: sizes"),
    ],
)
def test_wrong_index_of_old_checkpoint_is_refused(
    saved: Path, group: Any, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    folder = copy_without_checksums(saved, tmp_path / "a")
    replace_index(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder, group)


@pytest.mark.parametrize("name", [".metadata", TRAINER_FILE, CHECKSUM_FILE, "__0_0.distcp"])
def test_link_in_checkpoint_is_not_followed(saved: Path, group: Any, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved / "sharded", tmp_path / "a")
    shutil.move(tmp_path / "a" / name, tmp_path / "elsewhere")
    (tmp_path / "a" / name).symlink_to("../elsewhere")
    with pytest.raises(CheckpointError, match="is a link: a checkpoint's files lie in its folder"):
        load(tmp_path / "a", group)


@pytest.mark.parametrize("save_format", ["full", "sharded"])
def test_checkpoint_replaced_while_it_is_loaded_gives_what_was_there_first(
    saved: Path,
    expected: dict[str, Tensor],
    group: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_format: str,
) -> None:
    """The path leads to another checkpoint as soon as it is opened."""
    module, optimizer = make_module(seed=3)
    path = tmp_path / save_format
    (shutil.copytree if save_format == "sharded" else shutil.copy)(saved / save_format, path)
    torch_load = torch.load

    def replace_then_load(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(torch, "load", torch_load)
        save(module, optimizer, path, save_format, group)
        return torch_load(*args, **named)

    monkeypatch.setattr(torch, "load", replace_then_load)
    assert_equal(load(path, group), expected)
    assert torch.equal(load(path, group)["0.weight"], module.state_dict()["0.weight"])


def test_file_changed_in_place_while_it_is_loaded_raises(saved: Path, group: Any, tmp_path: Path) -> None:
    for save_format, name in (("full", ""), ("sharded", "__0_0.distcp")):
        path = tmp_path / save_format
        (shutil.copytree if save_format == "sharded" else shutil.copy)(saved / save_format, path)
        module, _ = make_module(seed=2)
        checkpoints = CheckpointFormat("full")
        content = checkpoints.load(path, True, group)
        os.utime(path / name if name else path, (1, 1))
        with pytest.raises(CheckpointError, match="was changed while it was loaded: load it again"):
            states.load_model_state(module, NO_SHARDS, content["state_dict"], True, checkpoints.fill)


def change_nothing_but(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({key: value})


def set_weight(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["state_dict"].update({"0.weight": value})


def set_buffer(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["state_dict"].update({"1.running_mean": value})


def set_optimizer(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({"optimizer_states": [value]})


def set_moment(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["optimizer_states"][0]["state"][0].update({"exp_avg": value})


def drop_groups(content: dict[str, Any]) -> None:
    del content["optimizer_states"][0]["param_groups"]


def repeat_number(content: dict[str, Any]) -> None:
    content["optimizer_states"][0]["param_groups"][0]["params"][1] = 0


def shorten_names(content: dict[str, Any]) -> None:
    content["optimizer_states"][0]["param_names"].pop()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (change_nothing_but("state_dict", "weights"), CheckpointError, "its state_dict is a str"),
        (change_nothing_but("state_dict", [1]), CheckpointError, "its state_dict is a list"),
        (set_weight("weights"), ShardingError, r"0\.weight is a str there, not a tensor"),
        (set_weight(None), ShardingError, r"0\.weight is a NoneType there"),
        (set_weight([[1.0]]), ShardingError, r"0\.weight is a list there"),
        (
            set_weight(torch.ones(3, 5, dtype=torch.complex64)),
            ShardingError,
            r"complex64 there, and torch\.float32 here",
        ),
        (set_weight(torch.ones(3, 5).to_sparse()), ShardingError, r"0\.weight is sparse or quantized"),
        (set_weight(torch.ones(5, 3)), ShardingError, r"0\.weight is \(5, 3\) there and \(3, 5\) here"),
        (set_buffer("mean"), ShardingError, r"1\.running_mean is a str there"),
        (set_buffer(torch.ones(3, dtype=torch.complex64)), ShardingError, r"1\.running_mean is torch\.complex64"),
        (set_optimizer("adam"), ShardingError, "it is a str, as no optimizer saves it"),
        (set_optimizer({}), ShardingError, "it holds no state of each parameter"),
        (set_optimizer({"state": {0: "x"}, "param_groups": []}), ShardingError, "it holds no state of each parameter"),
        (set_optimizer({"state": {}, "param_groups": [{}]}), ShardingError, "a group has no params"),
        (drop_groups, ShardingError, "it has no param_groups"),
        (repeat_number, ShardingError, "are not different numbers"),
        (shorten_names, ShardingError, "it names another number of parameters"),
        (set_moment("moment"), ShardingError, r"exp_avg of 0\.weight is a str there"),
        (
            set_moment(torch.ones(3, 5, dtype=torch.complex64)),
            ShardingError,
            r"exp_avg of 0\.weight is torch\.complex64",
        ),
        (set_moment(torch.ones(2, 5)), ShardingError, r"exp_avg of 0\.weight is \(2, 5\)"),
    ],
)
def test_foreign_content_raises_and_changes_nothing(
    saved: Path,
    group: Any,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    error: type[OSDPError],
    message: str,
) -> None:
    content = torch.load(saved / "full")
    change(content)
    torch.save(content, tmp_path / "a.ckpt")
    module, optimizer = make_module(seed=2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    checkpoints = CheckpointFormat("full")

    def check_and_load() -> None:
        loaded = checkpoints.load(tmp_path / "a.ckpt", True, group)
        for saved_state in loaded["optimizer_states"]:
            match_optimizer_state(optimizer, NO_SHARDS.unsharded_shape, names_of(module), saved_state)
        states.load_model_state(module, NO_SHARDS, loaded["state_dict"], True, checkpoints.fill)

    with pytest.raises(error, match=message):
        check_and_load()
    assert_equal(module.state_dict(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("pytorch-lightning_version"), "it holds no pytorch-lightning_version"),
        (change_nothing_but("loops", "x"), "its loops is a str"),
        (change_nothing_but("callbacks", [1]), "its callbacks is a list"),
        (change_nothing_but("optimizer_states", {}), "its optimizer_states is a dict"),
        (change_nothing_but("lr_schedulers", None), "its lr_schedulers is a NoneType"),
        (change_nothing_but("global_step", "3"), "its global_step is a str"),
    ],
)
def test_foreign_state_of_trainer_raises(
    saved: Path, group: Any, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    content = torch.load(saved / "full")
    change(content)
    torch.save(content, tmp_path / "a.ckpt")
    plugin = checkpointing.TorchCheckpointIO()
    with pytest.raises(CheckpointError, match=message):
        checkpointing.load(CheckpointFormat("full"), plugin, tmp_path / "a.ckpt", True, group)


def test_empty_parameter_passes_through_sharded_checkpoint(group: Any, tmp_path: Path) -> None:
    module = nn.ParameterDict({"empty": nn.Parameter(torch.empty(0, 3)), "full": nn.Parameter(torch.ones(2))})
    checkpoints = CheckpointFormat("sharded")
    with checkpoints.deferred_gathers(True, False):
        assert checkpoints.deferred_tensors is not None
        content = {"state_dict": states.model_state(module, NO_SHARDS, checkpoints.deferred_tensors)}
        checkpoints.save(content, tmp_path / "a", group)
    loaded = checkpoints.load(tmp_path / "a", True, group)
    other = nn.ParameterDict({"empty": nn.Parameter(torch.empty(0, 3)), "full": nn.Parameter(torch.zeros(2))})
    states.load_model_state(other, NO_SHARDS, loaded["state_dict"], True, checkpoints.fill)
    assert torch.equal(other["full"], torch.ones(2))


@pytest.mark.parametrize(
    ("chunks", "shape", "covers"),
    [
        ([((0,), (4,))], (4,), True),
        ([((0,), (2,)), ((2,), (2,))], (4,), True),
        ([((0,), (2,)), ((1,), (2,))], (4,), False),
        ([((0,), (3,)), ((1,), (3,))], (4,), False),
        ([((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 1), (1, 2))], (2, 3), True),
        ([((0, 0), (1, 3)), ((1, 0), (1, 2)), ((1, 1), (1, 2))], (2, 3), False),
        ([((0, 0), (2, 1)), ((0, 1), (2, 2))], (2, 3), True),
        ([((0, 0), (2, 3)), ((0, 0), (0, 3))], (2, 3), True),
        ([((), ())], (), True),
        ([], (), False),
        ([], (0, 3), True),
        ([((0,), (5,))], (4,), False),
    ],
)
def test_covers_once_counts_each_element(chunks: list[ChunkBounds], shape: tuple[int, ...], covers: bool) -> None:
    assert covers_once(chunks, shape) is covers
