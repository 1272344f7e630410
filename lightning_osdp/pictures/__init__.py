"""A plan as pictures and as one page of HTML; needs the extra ``pictures`` (matplotlib). Decides nothing."""

from lightning_osdp.pictures.figures import (
    decisions_figure,
    devices_figure,
    memory_figure,
    png,
    svg,
    throughput_figure,
    tradeoff_figure,
)
from lightning_osdp.pictures.page import html

__all__ = [
    "decisions_figure",
    "devices_figure",
    "html",
    "memory_figure",
    "png",
    "svg",
    "throughput_figure",
    "tradeoff_figure",
]
