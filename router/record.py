"""What one request did, as it goes into the ledger."""

from paceline.types import Timings
from router.accept import Accepted
from router.ledger.group import Group, temperature_bucket
from router.ledger.memory import Memory
from router.ledger.sums import AT, Row, add_speed, add_yield, nanoseconds, no_sums
from router.quantiles import bin_of
from router.tally import Tally

_TIMES = {
    "queue_ns": "queue_s", "prefill_ns": "prefill_s", "decode_ns": "decode_s", "ttft_ns": "time_to_first_token_s",
    "total_ns": "total_s",
}  # fmt: skip


def record(
    memory: Memory, accepted: Accepted, tally: Tally, timings: Timings, *, output_tokens: int, failed: bool
) -> None:
    """Hand over a request that has ended. Its rounds are counted where their batches were, the rest where most were."""
    rows = {batch: sums.row() for batch, sums in tally.sums.items()}
    main = max(rows, key=lambda batch: int(rows[batch][AT["rounds"]]), default="1")
    row = rows.setdefault(main, no_sums())
    _add_request(row, accepted, tally, timings, output_tokens=output_tokens, failed=failed)
    bins = {} if failed else _bins(tally, timings, len(accepted.prompt_ids), output_tokens)
    for batch, one in rows.items():
        memory.add(_group(accepted, batch), one, bins if batch == main else {})


def _group(accepted: Accepted, batch: str) -> Group:
    plan = accepted.plan
    return Group(
        task=accepted.task_type,
        tenant=accepted.tenant_group,
        drafter=plan.drafter,
        version=accepted.version,
        law=plan.law.value if plan.law else "",
        temperature=temperature_bucket(accepted.sampling.temperature),
        batch=batch,
        arm=accepted.decision.arm.value,
    )


def _add_request(
    row: Row, accepted: Accepted, tally: Tally, timings: Timings, *, output_tokens: int, failed: bool
) -> None:
    row[AT["requests"]] += 1
    row[AT["failed"]] += failed
    row[AT["prompt_tokens"]] += len(accepted.prompt_ids)
    row[AT["output_tokens"]] += output_tokens
    for column, name in _TIMES.items():
        row[AT[column]] += nanoseconds(getattr(timings, name))
    stats = tally.stats
    add_yield(row, stats.num_accepted_draft_tokens, stats.num_draft_tokens)
    if not failed:
        add_speed(row, output_tokens - 1, timings.decode_s)


def _bins(
    tally: Tally, timings: Timings, prompt_tokens: int, output_tokens: int
) -> dict[tuple[str, int], int]:
    times = {"ttft": timings.time_to_first_token_s, "total": timings.total_s}
    if output_tokens > 1:
        times |= {"gap": timings.decode_s / (output_tokens - 1), "pause": tally.longest_pause_s}
    # Lengths in the same bins, a token as a millisecond: what a memory budget is to be made for.
    times["length"] = 1e-3 * (prompt_tokens + output_tokens)
    return {(metric, bin_of(seconds)): 1 for metric, seconds in times.items()}
