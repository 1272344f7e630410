"""Jobs as users have them, beside DDP."""
