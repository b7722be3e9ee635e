"""The policy in words: figures of too few requests are withheld, and it is said how many are needed."""

import math

from cluster.policy_words import in_words
from paceline.v1 import router_pb2
from router.holdout import METRICS, QUANTILES, Comparison
from router.quantiles import fewest, quantile


def policy(speculative: int, plain: int) -> router_pb2.GetPolicyResponse:
    """After so many requests, each 1.0 s long plainly and 0.8 s speculatively."""
    counts = [{int(math.log(s / 1e-6) / math.log(1.02)): n} for s, n in ((0.8, speculative), (1.0, plain))]
    shown = router_pb2.GetPolicyResponse(holdout_share=0.03)
    for metric in METRICS:
        for p in QUANTILES:
            both = [quantile(one, p, 0.025) for one in counts]
            one = Comparison("code", metric, p, *both, (speculative, plain))
            shown.holdout.add(
                task="code",
                metric=metric,
                quantile=p,
                speculative_s=one.speculative.estimate,
                plain_s=one.plain.estimate,
                ratio_low=0.0 if math.isinf(one.plain.high) else one.ratio.low,
                ratio_high=one.ratio.high,
                speculative_requests=speculative,
                plain_requests=plain,
            )
    shown.guards.add(task="code", drafter="ngram", state="on", acceptance=0.75, requests=speculative)
    return shown


def test_three_requests_are_no_figures():
    """Neither quantiles nor an acceptance; what is needed stands there instead."""
    text = "\n".join(in_words(policy(3, 2)))
    assert "ms, ratio" not in text
    assert "0.75" not in text
    assert "3 requests that drafted in 24 h: too few for an acceptance, which takes 12" in text
    metrics = "first token, per token, longest pause, whole request"
    assert f"code, P50 of {metrics}: too few requests, 3 and 2; 9 of each are needed" in text
    assert f"P99 of {metrics}: too few requests, 3 and 2; {fewest(0.99, 0.025)} of each are needed" in text


def test_a_quantile_that_has_a_bound_is_shown_and_the_others_are_not():
    """200 plain requests bound P50 and P95; none of P99 is known but that many drafted ones were quicker."""
    text = "\n".join(in_words(policy(1200, 200)))
    assert "acceptance 0.75, 1200 requests that drafted in 24 h" in text
    assert "code, whole request, P50: 80" in text
    assert "code, whole request, P99: 80" in text
    tail = next(line for line in text.splitlines() if "whole request, P99" in line)
    assert "against ? ms, ratio between 0.00 and 0.8" in tail
    assert "too few" not in text


def test_both_bounds_begin_where_it_is_said():
    """One request fewer leaves a side open."""
    for p in QUANTILES:
        needed = fewest(p, 0.025)
        for requests, bounded in ((needed - 1, False), (needed, True)):
            found = quantile(dict.fromkeys(range(requests), 1), p, 0.025)
            assert (found.low > 0 and math.isfinite(found.high)) is bounded
