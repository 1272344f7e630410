"""What differs by device: collectives, timers, memory counters, allocator policy and prefetch limits."""
