"""Links of emulated clusters, scaled: a slow device gets the ratio of compute to communication of a fast one.

A step of T tokens takes 6 P T / F seconds of compute for P parameters on a device of F FLOP/s, and some 8 P / B seconds
of communication over a link of B bytes per second: their ratio depends on F / B, not on P. So all bandwidths are
multiplied by s = F here / F of the described device. A collective's latency is to be the same share of a layer's
compute, whose FLOPs are fewer here by the square of the width's ratio: latencies are divided by s and by 16 (width 256
stands for 1024).
"""

from __future__ import annotations

import statistics
import time

import torch

from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.whatif import hardware

PER_NODE, WIDTH_RATIO = 8, 4
NODE, NETWORK = "titan-rtx-pcie3", "10gbit"
"""The machine of the paper, and the network between several of them."""


def machine_flops() -> float:
    """FLOP/s of fp32 matrix products on one core of this machine."""
    torch.set_num_threads(1)
    a, seconds = torch.ones(768, 768), []
    for _ in range(40):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * 768**3 / statistics.median(seconds[10:])


def scaled_cluster(ranks: int, flops: float, network: str = NETWORK, width_ratio: int = WIDTH_RATIO) -> Cluster:
    """The cluster of so many ranks, eight in a node, for a device that makes ``flops`` FLOP/s in fp32."""
    nodes = max(1, ranks // PER_NODE)
    described = hardware.load(NODE if nodes == 1 else f"{nodes}x{NODE}+{network}")
    scale = flops / described.get_peak_flops("fp32")
    shrink = scale * width_ratio**2

    def scaled(link: hardware.LinkSpec | None) -> hardware.LinkSpec | None:
        if link is None:
            return None
        values = {
            name: value / shrink if name == "latency_s" else value * scale for name, value in link.model_dump().items()
        }
        return link.model_copy(update=values)

    changes = {
        "within_node": scaled(described.within_node),
        "between_nodes": scaled(described.between_nodes),
        "start_latency_s": described.start_latency_s / shrink,
    }
    return hardware.build_cluster(described.model_copy(update=changes), ranks).with_overlap(1.0)
