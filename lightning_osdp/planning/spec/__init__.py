"""The values that planning reads and returns: model, cluster, choices, constraints, plan."""
