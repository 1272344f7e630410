"""Tensor parallel operators: each rank keeps a slice of the weight, and activations travel instead of weights."""
