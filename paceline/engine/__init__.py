"""One engine for both tiers: a packed forward over KV slots, for any causal model.

``load_runner`` gives a ``Runner``; callers own sequences, the runner owns their keys and values. Needs torch.
"""

from paceline.engine.kv import SlotKV
from paceline.engine.packing import Segment
from paceline.engine.runner import Runner, load_runner

__all__ = ["Runner", "Segment", "SlotKV", "load_runner"]
