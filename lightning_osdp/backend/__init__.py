"""Everything that differs by device, behind functions that take the device.

=================  ===================================  =================================================
module             CUDA                                 CPU
=================  ===================================  =================================================
``collectives``    NCCL's own                           rings of messages over gloo (``cpu.ring``)
``timer``          events of the current stream         the clock; repeats are averaged if ranks share cores
``memory``         counters of the caching allocator    resident size of the process, control groups
``allocator``      expandable segments                  glibc's malloc: release or retain freed memory
``streams``        streams, limited prefetch            stubs (FairScale takes streams for granted)
=================  ===================================  =================================================

``hierarchical`` builds collectives over two levels of links; ``agree`` has ranks agree on numbers, objects and errors,
and ``rank_agreement`` on what comes next; ``liveness`` says whether a process lives; ``recursion`` sets the limit of
nesting; ``fused_adam`` picks Adam's fused kernel. What only CPUs need lies in ``backend.cpu``, which nothing outside of
this package imports.
"""
