"""Read the operators of a module from one step on fake tensors."""
