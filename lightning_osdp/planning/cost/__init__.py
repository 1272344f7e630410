"""Predict the step time and the memory of a plan."""
