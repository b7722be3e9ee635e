"""From logits to tokens: pure functions of (logits, parameters, seed, position), used alike by verify and by draft.

``choose`` draws by the coupled law of DESIGN section 4, ``follow`` along a draft, ``processed_logprobs`` gives the distribution it draws from,
``gumbel`` the noise. ``sample_draft`` and ``decide`` are the two ends of the sampled laws (``ratio``, ``block``). The meaning and order of the parameters stand in ``processors``. Nothing here keeps state or touches a
generator.
"""

from paceline.sampling.acceptance import DraftToken, draft_tokens
from paceline.sampling.contenders import native_contenders
from paceline.sampling.coupled import choose, follow, top2_gap
from paceline.sampling.noise import Domain, gumbel
from paceline.sampling.processors import BadLogitsError, TokenRow, processed_logprobs
from paceline.sampling.ranking import likeliest
from paceline.sampling.sampled import decide, sample_draft

__all__ = [
    "BadLogitsError",
    "Domain",
    "DraftToken",
    "TokenRow",
    "choose",
    "decide",
    "draft_tokens",
    "follow",
    "gumbel",
    "likeliest",
    "native_contenders",
    "processed_logprobs",
    "sample_draft",
    "top2_gap",
]
