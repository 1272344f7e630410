"""Optimal sharded data parallelism for PyTorch Lightning."""
