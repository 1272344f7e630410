"""Let one process train as rank 0 of many.

Other ranks' data are copies of its own, and collectives take the time of links that are described, not there. Memory,
kernels and the engine's work are real; losses mean nothing.
"""

from lightning_osdp.emulation.environment import EmulatedCluster

__all__ = ["EmulatedCluster"]
