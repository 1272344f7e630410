"""What only training on CPUs needs. Nothing outside of ``backend`` imports it."""
