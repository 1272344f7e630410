"""How tensors lie over ranks, and how they are saved and loaded."""
