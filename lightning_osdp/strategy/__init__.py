"""What Lightning calls."""
