"""Compare OSDP with DDP, FSDP, fully_shard and FairScale on the same models under the same hard limits.

    python -m bench comparison --help

Data flows one way: ``models`` and ``systems`` list what can be run, ``cells`` the conditions. ``launch`` runs one
``jobs.Job`` on forked ranks (``worker``, which writes a ``step_log``) and ``records`` stores the results. Then
``batch_probe`` and ``tournament`` decide what to run next; ``report``, ``document`` and ``figures`` show it. All
decisions are made from records, so a run that was stopped goes on where it was.
"""
