"""Side by side: OSDP and what people have, on the same models under the same hard limits.

    python -m bench.comparison --help

Data flows one way: ``models`` and ``systems`` say what can be run, ``cells`` under which conditions; ``launch`` runs
one ``jobs.Job`` on forked ranks (``worker``), ``records`` keeps what came of it, ``search`` and ``compare`` decide
what to run next, ``report``, ``document`` and ``figures`` show it. Everything is decided from records, so a run that
was stopped goes on where it was.
"""
