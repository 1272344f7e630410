"""Run the command ``osdp`` as ``python -m lightning_osdp``."""

from __future__ import annotations

import sys

from lightning_osdp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
