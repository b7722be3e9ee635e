"""What a team asks before it rolls speculation out, and while it does.

``plan`` reckons without hardware, ``check`` measures a pair on the team's own traffic and holds it against three gates
(memory, acceptance, tail), ``diagnose`` names the trouble that a ledger or recorded requests show. No torch, no Ray; the
commands around it are in ``cluster``.
"""
