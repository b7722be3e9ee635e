"""What tests stand on, ours and those of people who write a drafter: tiny models, a trace collector, running servers.

Everything here is a small real thing rather than a mock. The modules are imported one by one, because not every
test wants torch: ``paceline.testing.tiny_models``, ``.collector``, ``.servers``.
"""
