"""The acceptance ledger: what requests cost and what speculation gave, summed by group and time.

``sums`` are the figures, ``group`` what they are kept apart by, ``book`` both in memory with windows over them, ``store``
the file, ``keeper`` its one writer, ``memory`` the router's end: it adds up what its requests did, hands it on, and
decides from what it knows while the writer is away. ``service`` is the writer as a process of its own, for routers that
share one.
"""
