"""What more than one tier stands on.

``types``, ``errors``, ``config``, ``codec``, ``tokenizer``, ``link``, ``telemetry`` and ``serving`` import without
torch: the router and the client start in under a second. ``sampling`` and ``engine`` are the part that needs torch.
"""

__version__ = "0.1.0"
