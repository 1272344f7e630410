"""One thread for each process, and property tests without a clock."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
