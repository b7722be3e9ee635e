"""The draft tier: a disposable mirror of the verify tier's sequences that guesses how they go on.

A message comes in at ``stream`` (one Link), is judged by ``mirror`` (what the verifier last confirmed), and goes as
``news`` to a ``worker`` (the drafters' thread), which asks a drafter of ``drafters`` for every sequence that waits.
``service`` ties them into a server. Losing all of it loses speed, never a token.
"""
