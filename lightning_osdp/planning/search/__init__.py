"""Find the fastest plan that fits, for each batch size, and choose the batch size."""
