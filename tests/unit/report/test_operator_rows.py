"""The plan's table shows models as people think of them: blocks in one row, whole names, at most 80 columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import BlockPlan, ExecutionPlan, OperatorPlan
from lightning_osdp.report.operator_rows import MAX_ROWS, TableRow, operator_rows
from lightning_osdp.report.tables import WIDTH, plan_table, to_text, wrap_name
from tests.unit.report.test_tables import make_plan

DP, ZDP2, ZDP = Mode.DP, Mode.ZDP2, Mode.ZDP
Decide = Callable[[str, int], dict[str, object]]


def plan_of(module: nn.Module, decide: Decide, blocks: tuple[str, ...] = ()) -> ExecutionPlan:
    """Each module with parameters of its own as an operator, kept as ``decide`` says for its name and size."""
    seen: set[int] = set()
    operators = []
    for name, part in module.named_modules():
        own = [p for p in part.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        if own:
            size = sum(p.numel() for p in own)
            operators.append(OperatorPlan(name=name, num_parameters=size, **decide(name, size)))
    plans = tuple(BlockPlan(name=name, kind="", recomputed=False) for name in blocks)
    return make_plan(tuple(operators), blocks=plans)


def inside(module: nn.Module) -> nn.Module:
    """The module as it lies in a LightningModule."""
    outer = nn.Module()
    outer.model = module
    return outer


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        if name == "gpt2":
            return inside(transformers.GPT2LMHeadModel(transformers.GPT2Config()))
        if name == "llama":
            return inside(transformers.LlamaForCausalLM(transformers.LlamaConfig()))
        if name == "t5":
            return inside(transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=6)))
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(1000)))


def sharded_blocks(name: str, size: int) -> dict[str, object]:
    """The first seven blocks are sharded as units and recomputed, what is small is replicated."""
    number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
    if size < 10_000 or number is None:
        return {"slices": (DP,)}
    unit = ".".join(name.split(".")[:4])
    return {"slices": (ZDP,), "unit": unit, "is_recomputed": True} if number < 7 else {"slices": (ZDP2,)}


def rows_of(name: str) -> list[tuple[str, str, int]]:
    return [(row.label, row.mode, row.count) for row in operator_rows(plan_of(build(name), sharded_blocks))]


def test_rows_of_gpt2_are_its_two_kinds_of_blocks_and_what_is_around_them() -> None:
    assert rows_of("gpt2") == [
        ("model.transformer: wte, wpe, ln_f", "dp", 3),
        ("model.transformer.h.0-6", "4 of 6 zdp, one unit, recomputed", 42),
        ("ln_1-2", "dp", 14),
        ("model.transformer.h.7-11", "4 of 6 zdp2", 30),
        ("ln_1-2", "dp", 10),
    ]


def test_rows_of_llama_are_its_two_kinds_of_blocks_and_what_is_around_them() -> None:
    assert rows_of("llama") == [
        ("model.model: embed_tokens, norm", "dp", 2),
        ("model.model.layers.0-6", "7 of 9 zdp, one unit, recomputed", 63),
        ("input_layernorm, post_attention_layernorm", "dp", 14),
        ("model.model.layers.7-31", "7 of 9 zdp2", 225),
        ("input_layernorm, post_attention_layernorm", "dp", 50),
        ("model.lm_head", "dp", 1),
    ]


def test_rows_of_t5_tell_encoder_from_decoder_and_the_first_block_from_others() -> None:
    labels = [label for label, _, _ in rows_of("t5")]
    assert [label for label in labels if "block" in label] == [
        f"model.{part}.block.{numbers}" for part in ("encoder", "decoder") for numbers in ("0", "1-5")
    ]
    assert "layer.0.SelfAttention.relative_attention_bias" in labels  # which only the first blocks have


def test_block_whose_operators_differ_has_a_row_for_each_mode() -> None:
    def by_kind(name: str, size: int) -> dict[str, object]:
        slices = (ZDP, ZDP, ZDP, DP) if "mlp" in name else (ZDP2,) if "attn" in name else (DP,)
        return {"slices": slices, "split_dim": 0 if len(slices) > 1 else None, "is_recomputed": "layers" in name}

    rows = operator_rows(plan_of(build("llama"), by_kind))
    assert [(row.label, row.mode, row.count, row.is_part) for row in rows[1:5]] == [
        ("model.model.layers.0-31", "mixed, recomputed", 288, False),
        ("self_attn: q_proj, k_proj, v_proj, o_proj", "zdp2", 128, True),
        ("mlp: gate_proj, up_proj, down_proj", "zdp x 3 + dp x 1", 96, True),
        ("input_layernorm, post_attention_layernorm", "dp", 64, True),
    ]


def test_block_treated_as_one_is_one_row() -> None:
    names = [f"decoder.layers.{i}.{part}" for i in range(7) for part in ("q", "k", "v", "o", "up", "down")]
    operators = [
        OperatorPlan(name=name, slices=(ZDP,), unit=name.rpartition(".")[0], is_recomputed=True, num_parameters=10)
        for name in names
    ]
    (row,) = operator_rows(make_plan(tuple(operators)))
    assert row == TableRow("decoder.layers.0-6", "all 6 zdp, one unit, recomputed", 42, 420)


def test_weights_that_a_module_has_beside_its_layers_or_that_they_share_are_told_from_the_module() -> None:
    names = ("net", "net.embed", "net.head", "net.head.norm")
    rows = operator_rows(make_plan(tuple(OperatorPlan(name=n, slices=(ZDP2,), num_parameters=10) for n in names)))
    assert [row.label for row in rows] == ["net (itself)", "net: embed, head (itself)", "net.head.norm"]


def test_blocks_of_the_plan_count_where_names_have_no_number() -> None:
    operators = tuple(
        OperatorPlan(name=f"{block}.{part}", slices=(ZDP,), num_parameters=10)
        for block in ("first", "second")
        for part in ("up", "down")
    )
    blocks = tuple(BlockPlan(name=name, kind="", recomputed=False) for name in ("first", "second"))
    assert [row.label for row in operator_rows(make_plan(operators, blocks=blocks))] == ["first", "second"]
    assert [row.label for row in operator_rows(make_plan(operators))] == ["first: up, down", "second: up, down"]


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (lambda name, size: {"slices": (ZDP,)}, ["0-999"]),
        (lambda name, size: {"slices": (ZDP if int(name) >= 400 else DP,)}, ["0-399", "400-999"]),
        (lambda name, size: {"slices": (ZDP if int(name) in (3, 7) else DP,)}, ["0-2,4-6,8-999", "3,7"]),
        (lambda name, size: {"slices": (ZDP if int(name) % 2 else DP,)}, ["(500 of 0-998)", "(500 of 1-999)"]),
    ],
)
def test_rows_of_thousand_linears_are_as_many_as_modes(decide: Decide, expected: list[str]) -> None:
    rows = operator_rows(plan_of(build("linears"), decide))
    assert [row.label for row in rows] == expected
    assert sum(row.count for row in rows) == 1000


def test_rows_of_unlike_names_end_after_a_screen() -> None:
    operators = tuple(OperatorPlan(name=f"{'x' * (i + 1)}.linear", slices=(DP,), num_parameters=2) for i in range(100))
    rows = operator_rows(make_plan(operators))
    assert len(rows) == MAX_ROWS + 1
    assert (rows[-1].count, rows[-1].num_parameters) == (100 - MAX_ROWS, 2 * (100 - MAX_ROWS))
    assert "explain" in rows[-1].label


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "linears"])
def test_plan_table_fits_eighty_columns_and_breaks_no_name(name: str) -> None:
    plan = plan_of(build(name), sharded_blocks)
    text = to_text(plan_table(plan, profiling_s=12.5, collectives=1234))
    assert max(map(len, text.splitlines())) <= WIDTH
    words = {word for row in operator_rows(plan) for word in row.label.replace(".", " ").replace(",", " ").split()}
    shown = set(text.replace(".", " ").replace(",", " ").split())
    assert words - shown == set()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("model.layers.0-6", ["  model.layers.0-6"]),
        ("model.decoder.layers.0-31.attention", ["  model.decoder", "    .layers.0-31", "    .attention"]),
        ("mlp: gate_proj, up_proj", ["  mlp: gate_proj,", "    up_proj"]),
        ("x" * 30 + ".y", ["  " + "x" * 30, "    .y"]),
    ],
)
def test_wrap_name_breaks_before_dots_and_after_commas(name: str, lines: list[str]) -> None:
    assert wrap_name(name, 18, indent=2).split("\n") == lines


names_of_layers = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["q", "k1", "k2"])), unique=True, max_size=30
)


@given(names_of_layers, st.data())
def test_rows_count_every_operator_and_parameter_once(triples: list[tuple[int, int, str]], data: st.DataObject) -> None:
    operators = tuple(
        OperatorPlan(
            name=f"a.{i}.b.{j}.{k}", slices=(data.draw(st.sampled_from([DP, ZDP])),), num_parameters=1 + i + 4 * j
        )
        for i, j, k in triples
    )
    rows = [row for row in operator_rows(make_plan(operators)) if not row.is_part]
    assert sum(row.count for row in rows) == len(operators)
    assert sum(row.num_parameters for row in rows) == sum(op.num_parameters for op in operators)
