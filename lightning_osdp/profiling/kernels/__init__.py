"""Time the kernels that a traced step runs."""
