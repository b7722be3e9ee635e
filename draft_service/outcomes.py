"""Asking a drafter for a batch of sequences: what it says is checked, and one sequence costs only itself."""

import logging
from collections.abc import Sequence

from draft_service.drafters.base import Drafter, DraftRequest, Outcome, Pass, Sampled

log = logging.getLogger(__name__)


def proposed(drafter: Drafter, requests: Sequence[DraftRequest]) -> "list[Outcome | Exception]":
    """One outcome a request; a batch that fails is retried one by one, so that one sequence costs only itself."""
    try:
        outcomes = list(drafter.propose(requests))
        for request, outcome in zip(requests, outcomes, strict=True):
            check(request, outcome)
        return [*outcomes]
    except Exception as error:
        if len(requests) > 1:
            return [outcome for request in requests for outcome in proposed(drafter, [request])]
        log_failure(drafter.name, len(requests[0].token_ids), error)
        return [error]


def check(request: DraftRequest, outcome: Outcome) -> None:
    if outcome is None:
        return
    if isinstance(outcome, Pass):
        if request.alone:
            raise ValueError("passed on a question that is for this drafter alone")
        return
    if isinstance(outcome, Sampled):
        if len(outcome.distributions) != len(outcome.token_ids):
            raise ValueError(
                f"{len(outcome.distributions)} distributions for {len(outcome.token_ids)} tokens"
            )
        outcome = outcome.token_ids
    if len(outcome) > request.k:
        raise ValueError(f"{len(outcome)} guesses where at most {request.k} were asked for")
    if outcome and not (min(outcome) >= 0 and max(outcome) < request.vocab_size):
        # Not which: what is logged holds no tokens.
        raise ValueError(f"{len(outcome)} guesses hold an id outside 0 to {request.vocab_size - 1}")


def log_failure(drafter: str, length: int, error: Exception) -> None:
    """One line for each sequence that lost its drafter; where it happened only for those who look closer."""
    log.error("drafter %s failed on a sequence of %d tokens: %s", drafter, length, words(error))
    log.debug("where it failed", exc_info=error)


def words(error: Exception) -> str:
    """In words, without tokens: a key that was not found may be one."""
    return type(error).__name__ if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
