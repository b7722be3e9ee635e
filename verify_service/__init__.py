"""The verify tier: owns the target model and decides.

A request's life here: ``service`` takes it, ``scheduler`` gives it memory, ``engine`` runs one ``step`` after the
other: ``drafts`` gives the freshest valid block, one packed forward runs over all rows, ``verdict`` commits, and the
commit goes to the draft tier (``link_client``) before it goes to the router. Plain decoding is the same list of steps
with no block.
"""
