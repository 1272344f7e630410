"""Bad input of every kind and command: exit status 2 and one block of ours; 1 means that nothing fits, and no more."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from lightning_osdp.cli import error_block, main
from lightning_osdp.planning.spec.choices import Mode
from tests.support.models import hand_made_plan, some_cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "cli" / "fit.yaml"

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

PLAN = ("plan", "--cluster", "cluster.json", "--cache", "")
FIT = ("fit", "--config", "fit.yaml", "--trainer.accelerator=cpu", "--trainer.devices=1")
SIMULATE = ("simulate", "--config", "fit.yaml")
EMULATE = ("emulate", "--config", "fit.yaml", "--cache", "")
CHANGES: dict[str, Any] = {
    "devices.yaml": {"devices": "two"},
    "no-devices.yaml": {"devices": 0},
    "steps.yaml": {"max_steps": "many"},
    "accelerator.yaml": {"accelerator": "abacus"},
    "precision.yaml": {"precision": "12"},
    "strategy.yaml": {"strategy": {"class_path": "lightning_osdp.OSDPStrategy", "init_args": {"memory": "1GiB"}}},
    "limit.yaml": {"strategy": {"class_path": "lightning_osdp.OSDPStrategy", "init_args": {"memory_limit": "a lot"}}},
    "no-strategy.yaml": {"strategy": "fastest"},
    "trainer.yaml": "cpu",
    "list.yaml": [],
    "accumulate.yaml": {"accumulate_grad_batches": 0},
}
"""Configurations by what is wrong in their section trainer."""

MESSAGES = {
    "list.yaml": "list.yaml: its section trainer is [], no mapping\n",
    "accumulate.yaml": "accumulate_grad_batches=0 is not a positive whole number\n",
}
"""Words of the messages that are ours alone."""

WRITTEN = {"config.yaml", "osdp_plan.json"}
"""What `osdp fit` writes before it reads a checkpoint."""

CASES: list[tuple[tuple[str, ...], str]] = [
    ((), "command"),
    (("trian",), "trian"),
    (("plan", "--config"), "config"),
    ((*PLAN, "--config", "none.yaml"), "none.yaml"),
    ((*PLAN, "--config", "folder"), "folder"),
    ((*PLAN, "--config", "binary"), "binary"),
    ((*PLAN, "--config", "empty"), "has no section 'model'"),
    ((*PLAN, "--config", "list.json"), "has no section 'model'"),
    *(((*PLAN, "--config", name), MESSAGES.get(name, "")) for name in CHANGES),
    ((*PLAN, "--config", "typo.yaml"), "model: class_path 'model.Classifier': Option 'widht' is not accepted\n"),
    ((*PLAN, "--config", "nowhere.yaml"), "model: class_path 'nowhere.Model': No module named 'nowhere'\n"),
    ((*PLAN, "--config", "exits.yaml"), "exits.yaml: SystemExit: 0 (leaves.py:3, in __init__)"),
    (("fit", "--config", "nowhere.yaml"), "model: class_path 'nowhere.Model': No module named 'nowhere'\n"),
    ((*PLAN, "--config", "fit.yaml", "--memory-limit=-1GiB"), "-1GiB"),
    ((*PLAN, "--config", "fit.yaml", "--memory-limit", "0"), "0"),
    ((*PLAN, "--config", "fit.yaml", "--memory-limit", "nan"), "nan"),
    ((*PLAN, "--config", "fit.yaml", "--memory-limit", "inf"), "inf"),
    ((*PLAN, "--config", "fit.yaml", "--memory-limit", "300%"), "300%"),
    ((*PLAN, "--config", "fit.yaml", "--batch-size", "0"), "batch_size=0"),
    ((*PLAN, "--config", "fit.yaml", "--max-batch-size", "2.5"), "max_batch_size"),
    ((*PLAN, "--config", "fit.yaml", "--global-batch-size", "-8"), "global_batch_size=-8"),
    ((*PLAN, "--config", "fit.yaml", "--devices", "-1"), "devices=-1"),
    ((*PLAN, "--config", "fit.yaml", "--sharding-group", "rack"), "rack"),
    ((*PLAN, "--config", "fit.yaml", "--out", "folder"), "folder"),
    ((*PLAN, "--config", "fit.yaml", "--out", "a.json", "--html", "./a.json"), "can't both write a.json"),
    (("plan", "--config", "fit.yaml", "--cluster", "none.json"), "none.json"),
    (("plan", "--config", "fit.yaml", "--cluster", "folder"), "folder"),
    (("plan", "--config", "fit.yaml", "--cluster", "binary"), "binary"),
    (("plan", "--config", "fit.yaml", "--cluster", "empty"), "empty"),
    (("plan", "--config", "fit.yaml", "--cluster", "list.json"), "list.json"),
    (("plan", "--config", "fit.yaml", "--cluster", "plan.json"), "plan.json"),
    (("plan", "--config", "fit.yaml", "--cluster", "slow.json"), "slow.json"),
    *((("explain", name), name) for name in ("none.json", "folder", "binary", "empty", "list.json", "deep.json")),
    (("explain", "version.json"), "99"),
    (("explain", "nan.json"), "nan"),
    (("explain", "plan.json", "--html", "nowhere/page.html"), "nowhere"),
    (("explain", "plan.json", "--html", "fit.yaml"), "fit.yaml"),
    (("diff", "plan.json"), "after"),
    (("diff", "plan.json", "none.json"), "none.json"),
    *((("consolidate", name, "out.ckpt"), name) for name in ("none", "binary", "folder", "half")),
    (("consolidate", "folder", "folder/out.ckpt"), "folder"),
    (("profile", "--devices", "0"), "devices=0"),
    (("profile", "--devices", "two"), "devices"),
    (("profile", "--devices", "1", "--timeout", "-1"), "-1"),
    (("profile", "--devices", "1", "--timeout", "nan"), "nan"),
    (("profile", "--devices", "1", "--accelerator", "tpu"), "tpu"),
    (("profile", "--devices", "1", "--out", "folder"), "folder"),
    ((*SIMULATE, "--hardware", "folder"), "folder"),
    ((*SIMULATE, "--hardware", "list.json"), "list.json"),
    ((*SIMULATE, "--hardware", "binary"), "binary"),
    ((*SIMULATE, "--hardware", "h100-80gb-nvlink", "--devices", "0"), "0"),
    ((*SIMULATE, "--hardware", "h100-80gb-nvlink", "--devices", "-4"), "-4"),
    ((*SIMULATE, "--hardware", "h100-80gb-nvlink", "--dtype", "int3"), "int3"),
    ((*SIMULATE, "--hardware", "h100-80gb-nvlink", "--memory-limit", ""), "'' is not an amount of memory"),
    ((*EMULATE, "--hardware", "abacus"), "abacus"),
    (("emulate", "--config", "none.yaml", "--hardware", "h100-80gb-nvlink"), "none.yaml can't be read"),
    ((*EMULATE, "--hardware", "h100-80gb-nvlink", "--steps", "0"), "steps=0"),
    ((*EMULATE, "--hardware", "h100-80gb-nvlink", "--memory-limit", "300%"), "300%"),
    ((*EMULATE, "--hardware", "h100-80gb-nvlink", "--devices", "4", "--nodes", "3"), "3"),
    ((*EMULATE, "--hardware", "h100-80gb-nvlink", "--strategy", "best"), "best"),
    (("fit", "--config", "none.yaml"), "none.yaml"),
    (("fit", "--config", "binary"), "binary"),
    (("fit", "--config", "empty"), ""),
    (("fit", "--config", "list.json"), ""),
    ((*FIT, "--speed", "high"), "speed"),
    ((*FIT, "--trainer.max_steps=many"), "max_steps"),
    ((*FIT, "--trainer.strategy=fastest"), "fastest"),
    ((*FIT, "--ckpt_path", "none.ckpt"), "none.ckpt"),
    ((*FIT, "--ckpt_path", "binary"), "binary"),
    ((*FIT, "--trainer.strategy.plan", "nan.json"), "nan"),
    ((*FIT, "--trainer.strategy.memory_limit=-3GiB"), "-3GiB"),
    (("validate", "--config", "none.yaml"), "none.yaml"),
    (("predict", "--nothing"), "nothing"),
]


@pytest.fixture(autouse=True)
def _without_group() -> Iterator[None]:
    """A run of one rank that fails leaves its process group, as Lightning does."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all kinds, most of them bad."""
    path = tmp_path_factory.mktemp("bad")
    config = yaml.safe_load(EXAMPLE.read_text())
    config["model"]["init_args"] |= {"width": 32, "depth": 2}
    config["trainer"]["strategy"]["init_args"]["memory_limit"] = "90%"  # this process has run other tests
    (path / "fit.yaml").write_text(yaml.safe_dump(config))
    for name, change in CHANGES.items():
        trainer = config["trainer"] | change if isinstance(change, dict) else change
        (path / name).write_text(yaml.safe_dump(config | {"trainer": trainer}))
    for name, model in {"typo": ("model.Classifier", {"widht": 3}), "nowhere": ("nowhere.Model", {})}.items():
        changed = {"model": {"class_path": model[0], "init_args": model[1]}}
        (path / f"{name}.yaml").write_text(yaml.safe_dump(config | changed))
    (path / "exits.yaml").write_text(yaml.safe_dump(config | {"model": {"class_path": "leaves.Leaves"}}))
    (path / "leaves.py").write_text("import model\nclass Leaves(model.Classifier):\n    def __init__(self): exit(0)\n")
    (path / "model.py").write_text((EXAMPLE.parent / "model.py").read_text())
    cluster, plan = some_cluster(2), json.loads(hand_made_plan({"up": Mode.DP}, 2).to_json())
    (path / "cluster.json").write_text(cluster.model_dump_json())
    (path / "slow.json").write_text(cluster.model_dump_json().replace('"latency_s":', '"latency_s":-', 1))
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "version.json").write_text(json.dumps(plan | {"version": 99}))
    (path / "nan.json").write_text(json.dumps(plan | {"memory_limit_bytes": float("nan")}))
    (path / "list.json").write_text("[1, 2]")
    (path / "deep.json").write_text("[" * 5000 + "]" * 5000)
    (path / "binary").write_bytes(b"\x80\x02\xff\xfe\x00\x01" * 100)
    (path / "empty").touch()
    (path / "folder").mkdir()
    (path / "half").mkdir()
    torch.save({"state_dict": {}}, path / "half" / "trainer.pt")
    return path


@pytest.mark.parametrize(("words", "named"), CASES, ids=[" ".join(words) or "nothing" for words, _ in CASES])
def test_bad_input_is_status_2_and_one_block(
    folder: Path, words: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["osdp", *words])
    monkeypatch.delitem(sys.modules, "model", raising=False)
    monkeypatch.setattr(error_block, "HEAD_START_S", 0.0)
    before = {path.name for path in folder.iterdir()} - WRITTEN
    status = main.main(list(words))
    out, error = capfd.readouterr()
    assert status == main.BAD_INPUT, error
    assert error.count("osdp: error: ") == 1, error
    assert "Traceback" not in out + error
    assert named in error[error.index("osdp: error: ") :], error
    assert {path.name for path in folder.iterdir()} - WRITTEN == before
