"""Solve the multiple-choice knapsack that one batch size poses, exactly."""
