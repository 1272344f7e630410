"""The OSDP paper's settings (arXiv 2209.13258, figure 5), planned by this package: docs/paper.md."""
