"""Everything that only training on CUDA devices needs."""
