"""One sequence's call on the stream that all share."""

from pathlib import Path

from paceline.v1 import common_pb2, verify_pb2
from router.decode_calls import DecodeCall


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def step(number_of_others: int) -> bytes:
    record = common_pb2.RoundRecord(index=1, committed=1, drafter="ngram", verify_s=0.1, forward_s=0.1)
    run = verify_pb2.DecodeRun(position=5, token_ids=[1], round=record)
    response = verify_pb2.DecodeResponse(run=run)
    events = [verify_pb2.DecodeEvent(number=n, response=response) for n in range(number_of_others + 1)]
    return verify_pb2.DecodeManyResponse(events=events).SerializeToString()


async def test_a_call_that_is_read_slowly_holds_its_own_tokens_only() -> None:
    """4,000 tokens beside 63 other sequences: some megabytes wait, not a hundred; in order, none lost."""
    call, message = DecodeCall(lambda: None), step(63)
    before = resident_mb()
    for position in range(4000):
        response = verify_pb2.DecodeManyResponse.FromString(message).events[7].response
        response.run.position = position
        call.put(response)
    assert resident_mb() - before < 30
    assert [(await call.read()).run.position for _ in range(4000)] == list(range(4000))
