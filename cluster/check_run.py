"""The runs behind ``paceline check``: every request decoded plainly, speculatively, and plainly again, in blocks that take turns.

The second plain run says how far plain decoding moves by itself (``gates.noise``); which of the two comes first takes turns.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.asking import record_of
from cluster.words import lasting
from gates.capacity import Memory
from gates.check import Facts
from gates.evidence import PLAIN, SPECULATIVE, from_record
from gates.pairs import PairOfRuns
from gates.traffic import Asked
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.errors import PacelineError, PeerLostError
from paceline.serving.channel import error_from_rpc, open_channel
from paceline.types import Mode, ProposalOutcome, RoundRecord
from paceline.v1 import verify_pb2, verify_pb2_grpc

_BLOCK = 6
"""Requests of one way in a row, at least: a neighbour on the machine meets both ways alike."""
_ROUND_COUNTS = ("drafted", "accepted", "ignored", "committed", "batch_sequences", "batch_rows")
_ROUND_TIMES = ("draft_s", "network_s", "wait_s", "verify_s")
AGAIN = "again"
_MODES = {PLAIN: Mode.PLAIN, SPECULATIVE: Mode.SPECULATIVE, AGAIN: Mode.PLAIN}
_WAYS = (PLAIN, SPECULATIVE, AGAIN)


@dataclass(frozen=True, slots=True)
class Runs:
    """What was measured, and the records of it: plain, speculative, plain again."""

    pairs: tuple[PairOfRuns, ...]
    records: tuple[dict[str, Any], ...]
    drafter: str
    drafter_version: str
    law: str
    numerics: str


async def run_pairs(
    client: Client,
    requests: Sequence[Asked],
    *,
    load: int,
    repeats: int,
    max_tokens: int | None,
    drafter: str,
    progress: Callable[[str], None],
) -> Runs:
    """All requests both ways, ``load`` streams at the same time, the median one of ``repeats`` counts.

    Raises PacelineError when the pair cannot speculate.
    """
    mark = secrets.token_hex(4)
    size = max(load, _BLOCK)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    await _block(client, requests[:2], SPECULATIVE, f"{mark}-warm", load, max_tokens, drafter)
    begun = time.monotonic()
    for first in range(0, len(requests), size):
        left_s = (time.monotonic() - begun) * (len(requests) - first) / max(first, 1)
        left = f"; about {lasting(left_s)} left" if first else ""
        progress(f"request {first} of {len(requests)}, each plainly, speculatively, plainly again{left}")
        part = requests[first : first + size]
        runs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in _WAYS}
        for repeat in range(repeats):
            for way in _WAYS if (first // size + repeat) % 2 else reversed(_WAYS):
                # A tenant for each way and time: what one has left in memory must not serve the other.
                tenant = f"{mark}-{way}-{repeat}"
                runs[way].append(await _block(client, part, way, tenant, load, max_tokens, drafter))
        for way, times in runs.items():
            found[way] += [_median(list(same)) for same in zip(*times, strict=True)]
    progress("")
    plans = [record["plan"] for record in found[SPECULATIVE]]
    if not any(plan["mode"] == SPECULATIVE for plan in plans):
        raise PacelineError(f"no request was decoded speculatively: {plans[0]['reason']}")
    plan = next(plan for plan in plans if plan["mode"] == SPECULATIVE)
    return Runs(
        tuple(
            PairOfRuns(*map(from_record, three)) for three in zip(*(found[way] for way in _WAYS), strict=True)
        ),
        tuple(record for way in _WAYS for record in found[way]),
        plan["drafter"],
        plan["drafter_version"],
        plan["law"] or "",
        found[PLAIN][0]["numerics"],
    )


async def of_tasks(
    client: Client,
    requests: Sequence[Asked],
    tasks: Sequence[str],
    *,
    load: int,
    progress: Callable[[str], None],
) -> list[Asked]:
    """The requests of some tasks: those that name one, and those that the router takes for one."""
    gate, mark = asyncio.Semaphore(load), secrets.token_hex(4)
    progress("asking the router for the task of requests that name none")

    async def told(asked: Asked) -> str:
        async with gate:
            return asked.task or await _task_of(client, asked, f"{mark}-task")

    names = await asyncio.gather(*map(told, requests))
    progress("")
    return [asked for asked, name in zip(requests, names, strict=True) if name in tasks]


async def _task_of(client: Client, asked: Asked, tenant: str) -> str:
    """What the router takes a request for: one token of it, decoded plainly."""
    request = generate_request(**asked.said(), max_tokens=1, tenant=tenant, mode=Mode.PLAIN)
    found = ""
    async for event in client.generate(request):
        if isinstance(event, Started):
            found = event.task_type
    return found


def _median(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of runs of one request, that of the median time: a neighbour on the machine is not the drafter's doing."""
    return sorted(records, key=lambda record: float(record["timings"]["total_s"]))[(len(records) - 1) // 2]


async def _block(
    client: Client,
    requests: Sequence[Asked],
    way: str,
    tenant: str,
    load: int,
    max_tokens: int | None,
    drafter: str,
) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(load)

    async def gated(asked: Asked) -> dict[str, Any]:
        async with gate:
            return await _one(client, asked, way, tenant, max_tokens, drafter)

    return list(await asyncio.gather(*map(gated, requests)))


async def _one(
    client: Client, asked: Asked, way: str, tenant: str, max_tokens: int | None, drafter: str
) -> dict[str, Any]:
    request = generate_request(
        **asked.said(),
        seed=asked.seed,
        max_tokens=asked.max_tokens or max_tokens,
        task_type=asked.task,
        tenant=tenant,
        mode=_MODES[way],
        drafter=(drafter or None) if way == SPECULATIVE else None,
    )
    started: Started | None = None
    ids: list[int] = []
    async for event in client.generate(request):
        match event:
            case Started():
                started = event
            case Chunk():
                ids += event.token_ids
            case Finished():
                assert started is not None, "a stream begins with it"
                known = await client.list_requests(request_id=started.request_id, limit=1)
                extra = {
                    "key": asked.key,
                    "temperature": asked.temperature,
                    "at": time.time(),
                    "rounds": [_round(one) for summary in known for one in summary.rounds if _asked(one)],
                }
                if way == AGAIN:
                    extra["again"] = True
                return record_of(started, event, ids) | extra
    raise PacelineError("the stream ended without an answer")


def _asked(one: RoundRecord) -> bool:
    """Whether a drafter was asked for the round; plain ones are left out of the records, they say nothing more."""
    return one.outcome is not ProposalOutcome.NONE


def _round(one: RoundRecord) -> dict[str, Any]:
    counts = {name: getattr(one, name) for name in _ROUND_COUNTS}
    return (
        counts
        | {name: round(getattr(one, name), 6) for name in _ROUND_TIMES}
        | {"outcome": one.outcome.value}
    )


async def memory_of(address: str, drafter: str) -> tuple[Memory | None, bool, int]:
    """What the pair takes, whether ``drafter`` lies apart, and sequences set; (None, False, 1) where nobody tells."""
    async with open_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        try:
            info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest(), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            meant = error_from_rpc(error)
            if isinstance(meant, PeerLostError):
                return None, False, 1
            raise meant from error
    if not info.HasField("memory"):
        return None, False, max(1, info.kv_slots)
    # A cascade asks others: all that is loaded counts, unless one alone is meant.
    named = [one for one in info.drafter_memory if one.name == drafter]
    drafters = named or list(info.drafter_memory)
    shared = [one for one in drafters if one.shared]
    memory = Memory(
        info.memory.device_bytes,
        info.memory.weights_bytes,
        info.memory.kv_bytes_per_token,
        sum(one.weights_bytes for one in shared),
        sum(one.kv_bytes_per_token for one in shared),
    )
    return memory, bool(drafters) and not shared, max(1, info.kv_slots)


async def facts_of(client: Client, runs: Runs, **known: Any) -> Facts:
    """What the server says of itself, with what the runs showed."""
    model = (await client.server_info()).model
    return Facts(
        model=model.name,
        precision=model.dtype,
        device=model.device,
        numerics=runs.numerics,
        law=runs.law,
        drafter=runs.drafter,
        drafter_version=runs.drafter_version,
        # The link refuses a drafter with another tokenizer: one that drafted has the same.
        tokenizer_shared=True,
        **known,
    )
