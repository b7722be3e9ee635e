"""One request from the command line: checked, streamed, and its figures in words or as JSON."""

import contextlib
import dataclasses
import enum
import json
import sys
from collections.abc import Sequence
from typing import Any

from cluster.decision_words import why_no_drafts
from cluster.waterfall import plan_in_words, stats_in_words, tokens_in_words
from cluster.words import counted, show
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.errors import FieldViolation, InvalidRequestError, PacelineError
from paceline.v1.router_pb2 import GenerateRequest


async def ask(
    address: str, fields: dict[str, Any], wrong: list[FieldViolation], *, stats: bool, as_json: bool
) -> None:
    """Stream the answer to standard output, figures to standard error.

    ``fields`` are the arguments of ``generate_request``; ``wrong`` is what is known to be wrong already.
    """
    line_open = False
    token_ids: list[int] = []
    try:
        async with Client(address) as client:
            request = await _checked_request(client, fields, wrong)
            async with contextlib.aclosing(client.generate(request)) as events:
                async for event in events:
                    match event:
                        case Started():
                            started = event
                            if stats:
                                note(f"request {event.request_id}, task {event.task_type}, seed {event.seed}")
                                note(f"plan: {plan_in_words(event.plan)} ({event.plan.reason})")
                                if words := why_no_drafts(event.plan, event.decision):
                                    note(words)
                        case Chunk():
                            sys.stdout.write(event.text)
                            sys.stdout.flush()
                            token_ids += event.token_ids
                            line_open = True
                        case Finished():
                            finished = event
    finally:  # an error gets a line of its own
        if line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
    note(figures(finished))
    if stats:
        note(stats_in_words(finished.speculative))
        note(_timings_in_words(finished))
    if as_json:
        print(json.dumps(record_of(started, finished, token_ids)))


def note(text: str) -> None:
    """A line on standard error."""
    show([text], err=True)


async def _checked_request(
    client: Client, fields: dict[str, Any], wrong: list[FieldViolation]
) -> GenerateRequest:
    """The request. Raises InvalidRequestError that names all that is wrong with it.

    Where something is wrong that the server cannot be told (an option, a number that the wire cannot carry), the server
    is asked for the rest with a request that it must refuse: one of no tokens.
    """
    try:
        request = generate_request(**fields)
    except InvalidRequestError as error:
        wrong = [*wrong, *error.violations]
    if not wrong:
        return request
    named = {violation.field for violation in wrong}
    left = {name: value for name, value in fields.items() if _PATHS.get(name, name) not in named}
    made_up = {"max_tokens"}  # fields of the probe that the caller did not fill so
    if left.get("text") is None and left.get("messages") is None:
        left["token_ids"] = []  # some form of prompt there must be
        made_up.add("tokens.ids")
    probe = generate_request(**left | {"max_tokens": 0})
    try:
        async with contextlib.aclosing(client.generate(probe)) as events:
            await anext(events)
    except InvalidRequestError as error:
        wrong = [*wrong, *(one for one in error.violations if one.field not in named | made_up)]
    except PacelineError:
        pass  # nobody there to ask: what is known is said
    raise InvalidRequestError(wrong)


_PATHS = {
    "top_k": "sampling.top_k",
    "seed": "sampling.seed",
    "k": "decoding.k",
    "drafter": "decoding.drafter",
    "messages": "chat.messages",
}
"""Arguments of ``generate_request`` that are checked there, and the path of their field."""


def record_of(started: Started, finished: Finished, token_ids: Sequence[int]) -> dict[str, Any]:
    """All that is known of a request but its text, in plain values: what ``paceline diagnose --records`` reads."""
    stats = finished.speculative
    ratios = {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
    }
    known = {
        "request_id": started.request_id,
        "task_type": started.task_type,
        "seed": started.seed,
        "trace_id": started.trace_id,
        "token_ids": list(token_ids),
        **dataclasses.asdict(finished),
    }
    known["speculative"] |= ratios
    plain: dict[str, Any] = json.loads(
        json.dumps(known, default=lambda value: value.value if isinstance(value, enum.Enum) else str(value))
    )
    return plain


def _timings_in_words(finished: Finished) -> str:
    spent = finished.timings
    return (
        f"ms: queue {spent.queue_s * 1e3:.1f}, prefill {spent.prefill_s * 1e3:.1f}, "
        f"decode {spent.decode_s * 1e3:.1f} (draft {spent.draft_s * 1e3:.1f}, "
        f"network {spent.network_s * 1e3:.1f}, wait {spent.wait_s * 1e3:.1f}, "
        f"verify {spent.verify_s * 1e3:.1f}, overhead {spent.overhead_s * 1e3:.1f}); numerics {finished.numerics}"
    )


def figures(finished: Finished) -> str:
    """One line: what was decoded, how, how fast."""
    timings, usage, stats = finished.timings, finished.usage, finished.speculative
    parts = [
        plan_in_words(finished.plan),
        tokens_in_words(usage),
        f"first after {timings.time_to_first_token_s:.2f} s",
    ]
    speed = tokens_per_s(finished)
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if stats.draft_acceptance_rate is not None and stats.mean_acceptance_length is not None:
        parts.append(
            f"accepted {stats.draft_acceptance_rate:.0%}, {stats.mean_acceptance_length:.2f} tokens a block"
        )
    parts.append(f"ended by {finished.finish_reason.value}")
    if finished.resumed:
        parts.append(f"resumed {counted(finished.resumed, 'time')}")
    return " · ".join(parts)


def tokens_per_s(finished: Finished) -> float | None:
    """Decoding speed, the prefill's token left out; None for a single token."""
    decoded = finished.usage.completion_tokens - 1
    return decoded / finished.timings.decode_s if decoded > 0 and finished.timings.decode_s > 0 else None
