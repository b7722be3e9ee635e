"""From logits to tokens: pure functions of (logits, parameters, seed, position), used alike by verify and by draft.

``choose`` draws by the coupled law of DESIGN section 4, ``processed_logprobs`` gives the distribution it draws from,
``gumbel`` the noise. The meaning and order of the parameters stand in ``processors``. Nothing here keeps state or touches a
generator.
"""

from paceline.sampling.coupled import choose, top2_gap
from paceline.sampling.noise import Domain, gumbel
from paceline.sampling.processors import BadLogitsError, TokenRow, processed_logprobs

__all__ = ["BadLogitsError", "Domain", "TokenRow", "choose", "gumbel", "processed_logprobs", "top2_gap"]
