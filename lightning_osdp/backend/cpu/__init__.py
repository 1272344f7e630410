"""Everything that only training on CPUs needs."""
