"""Small models and hand-made plans that the tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, HierarchicalLinks, Link, ShardingLink
from lightning_osdp.planning.spec.plan import ExecutionPlan, ModelIdentity, OperatorPlan, Prediction

VOCABULARY, WIDTH, LENGTH = 61, 32, 12


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without bias: that of the keys has no gradient but rounding noise, which Adam blows up to full steps.
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A GPT small enough for tests: (b, t) token ids to (b, t, VOCABULARY) logits."""

    def __init__(self, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross entropy, mean over all tokens of the batch."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt_batches(steps: int, batch: int, seed: int = 0) -> Tensor:
    """(steps, batch, LENGTH + 1) random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (steps, batch, LENGTH + 1), generator=generator)


def two_groups(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only, told apart by name and shape as users do."""
    decay = [p for n, p in model.named_parameters() if p.dim() >= 2 and not n.endswith("position")]
    rest = [p for n, p in model.named_parameters() if p.dim() < 2 or n.endswith("position")]
    groups = [{"params": decay, "weight_decay": 0.1, "lr": lr}, {"params": rest, "weight_decay": 0.0, "lr": 2 * lr}]
    return torch.optim.AdamW(groups)


def some_cluster(ranks: int = 2, **changes: object) -> Cluster:
    """A cluster whose collectives cost 1 ms latency and 1 ns per byte."""
    fit = CollectiveFit(latency_s=1e-3, s_per_byte=1e-9)
    values = {"devices_per_node": ranks, "device": "cpu", "backend": "gloo"} | changes
    return Cluster(link=values.pop("link", Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)), **values)


def uniform_hierarchical_links(link: Link) -> HierarchicalLinks:
    """Inside nodes, between them and in two stages, all is as it is over the world."""
    sharding = ShardingLink(all_gather=link.all_gather, reduce_scatter=link.reduce_scatter)
    return HierarchicalLinks(intra_node=sharding, inter_node=link.all_reduce, hierarchical=sharding)


def hand_made_plan(
    modes: Mapping[str, Mode], ranks: int, *, batch_size: int = 1, accumulation: int = 1, fingerprint: str = ""
) -> ExecutionPlan:
    """A plan that says just which operators are kept how."""
    return ExecutionPlan(
        model=ModelIdentity(fingerprint=fingerprint, num_parameters=0),
        cluster=some_cluster(ranks),
        memory_limit_bytes=1 << 40,
        batch_size=batch_size,
        accumulate_grad_batches=accumulation,
        global_batch_size=batch_size * accumulation * ranks,
        operators=tuple(OperatorPlan(name=n, slices=(Mode(m),), num_parameters=0) for n, m in modes.items()),
        predicted=Prediction(
            step_time_s=1.0,
            compute_time_s=1.0,
            communication_time_s=0.0,
            samples_per_s=1.0,
            peak_memory_bytes=1,
            overhead_bytes=0,
        ),
    )


def wrap_blocks(plan: ExecutionPlan, blocks: Sequence[str]) -> ExecutionPlan:
    """The same with one unit for what is sharded in each of these modules."""
    operators = tuple(
        op
        if op.slices == (Mode.DP,)
        else op.model_copy(update={"unit": next((b for b in blocks if op.name.startswith(b + ".")), "")})
        for op in plan.operators
    )
    return plan.model_copy(update={"operators": operators})


def weighted_modules(module: nn.Module) -> list[str]:
    """Names of the Linear and Embedding modules, in the order of the tree."""
    return [name for name, child in module.named_modules() if isinstance(child, (nn.Linear, nn.Embedding))]


def modes_for(module: nn.Module, policy: str) -> dict[str, Mode]:
    """``dp``, ``zdp2``, ``zdp`` for all operators, or ``mixed``: one after the other."""
    names = weighted_modules(module)
    if policy == "mixed":
        return {name: list(Mode)[i % 3] for i, name in enumerate(names)}
    return dict.fromkeys(names, Mode(policy))
