"""Apply a plan to a module: shard, gather, reduce, recompute and update."""
