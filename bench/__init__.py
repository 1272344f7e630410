"""Benchmarks: ``python -m bench NAME`` prints the figures of both sides of a comparison from one run."""
