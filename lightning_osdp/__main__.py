"""``python -m lightning_osdp`` is ``osdp``."""

from __future__ import annotations

import sys

from lightning_osdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
