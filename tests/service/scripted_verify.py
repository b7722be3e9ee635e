"""A real verify server with a script in place of a model: what the router is tested against.

The output is a fixed list of token ids, a pure function of the position as the real one is, so any replica can go on
where another broke off. ``python scripted_verify.py TOKENIZER_DIR PORT ID...`` runs one as a process that can be killed.
"""

import asyncio
import atexit
import functools
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import status_pb2

import router.service
from paceline import codec
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.config import PacelineConfig, ServerConfig, load_config
from paceline.serving import TierServer
from paceline.serving.interceptors import told_status
from paceline.testing.servers import running_server
from paceline.tokenizer import Tokenizer
from paceline.types import FinishReason, ModelInfo, ProposalOutcome, RoundRecord, SpeculativeStats, Timings
from paceline.v1 import common_pb2, verify_pb2, verify_pb2_grpc

EOS = 2
MAX_CONTEXT = 256


@functools.cache
def tokenizer_dir() -> Path:
    """A directory with the tiny models' tokenizer, gone at exit."""
    from paceline.testing.tiny_models import write_tiny_tokenizer

    held = tempfile.TemporaryDirectory(prefix="paceline-router-")
    atexit.register(held.cleanup)
    path = write_tiny_tokenizer(Path(held.name))
    (path / "config.json").write_text("{}")
    return path


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(tokenizer_dir())


@dataclass(frozen=True)
class Break:
    """End a Decode call once ``after`` output tokens are sent (0: right after admission, -1: before it).

    ``silent`` ends the stream that all sequences share with OK and without an answer, ``transport`` with ``code``; otherwise ``error`` is
    raised or ``code`` is the sequence's status.
    """

    after: int
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    error: Exception | None = None
    silent: bool = False
    transport: bool = False


@dataclass
class Script:
    """What the replica does. Tests change it while it runs."""

    output: Sequence[int] = ()
    run_lengths: Sequence[int] = (1,)  # used in turn; a run is one round after the first token
    k: int = 0  # 0: rounds are plain; else rounds draft k tokens and accept all but the last of a run
    delay_s: float = 0.0  # before each run
    breaks: list[Break] = field(default_factory=list)  # one is used up by each call
    position_error: int = 0  # added to the position of every run but the first
    ignores_limits: bool = False  # sends on past max_tokens and stop tokens
    holds_finished: bool = False  # never sends the finished
    drafters: Sequence[tuple[str, bool]] = ()
    tokenizer_fingerprint: str | None = None
    model_fingerprint: str = "weights"
    max_context: int = MAX_CONTEXT
    num_running: int = 0


class _EndOfStreamError(Exception):
    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code


class _AbortedError(Exception):
    def __init__(self, status: status_pb2.Status) -> None:
        self.status = status


class _OneOfMany:
    """The context that Decode sees of one sequence of a DecodeMany."""

    def __init__(self, start: verify_pb2.DecodeStart, outbox: asyncio.Queue) -> None:
        self._start, self._outbox = start, outbox

    def invocation_metadata(self):
        return (("traceparent", self._start.traceparent),) if self._start.traceparent else ()

    def time_remaining(self) -> float | None:
        return self._start.timeout_s if self._start.HasField("timeout_s") else None

    async def write(self, response: verify_pb2.DecodeResponse) -> None:
        self.send(response=response)

    async def abort(self, code: grpc.StatusCode, message: str) -> None:
        raise _AbortedError(status_pb2.Status(code=code.value[0], message=message))

    def send(self, **event) -> None:
        self._outbox.put_nowait(verify_pb2.DecodeEvent(number=self._start.number, **event))


class ScriptedVerify(verify_pb2_grpc.VerifyServiceServicer):
    """Follows ``script`` and remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[verify_pb2.DecodeRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.deadlines: list[float | None] = []
        self.active = 0
        self.ended = asyncio.Event()  # whenever a call ends
        self.is_old = False  # knows no DecodeMany

    async def GetModelInfo(self, request, context):
        script = self.script
        return verify_pb2.GetModelInfoResponse(
            model=codec.model_info_to_pb(
                ModelInfo(
                    "tiny",
                    script.model_fingerprint,
                    script.tokenizer_fingerprint or tokenizer().fingerprint,
                    tokenizer().vocab_size,
                    script.max_context,
                    "float32",
                    "cpu",
                    "scripted",
                    "a test",
                    "deterministic",
                )
            ),
            eos_token_ids=[EOS],
            drafters=[
                common_pb2.DrafterInfo(name=name, version="1", available=available)
                for name, available in script.drafters
            ],
            num_running=script.num_running,
            kv_slots=8,
            kv_slots_free=8,
        )

    async def Decode(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        self.active += 1
        try:
            await self._decode(request, context)
        finally:
            self.active -= 1
            self.ended.set()

    async def DecodeMany(self, request_iterator, context):
        """Each sequence as a Decode of its own; one that ends without an answer ends the stream."""
        if self.is_old:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        running: dict[int, asyncio.Task] = {}
        outbox: asyncio.Queue[verify_pb2.DecodeEvent] = asyncio.Queue()

        async def one(start: verify_pb2.DecodeStart) -> None:
            decoding = _OneOfMany(start, outbox)
            try:
                await self.Decode(start.request, decoding)
            except _EndOfStreamError:
                await outbox.join()
                raise
            except Exception as error:
                status = error.status if isinstance(error, _AbortedError) else told_status(error, "Decode")
                decoding.send(status=status.SerializeToString())

        async def write() -> None:
            while True:
                event = await outbox.get()
                await context.write(verify_pb2.DecodeManyResponse(events=[event]))
                outbox.task_done()

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write())
                async for message in request_iterator:
                    if message.HasField("start"):
                        running[message.start.number] = tasks.create_task(one(message.start))
                    elif message.cancel in running:
                        running[message.cancel].cancel()
        except* _EndOfStreamError as group:
            code = group.exceptions[0].code
            if code is not grpc.StatusCode.OK:
                await context.abort(code, "scripted")

    async def _decode(self, request, context) -> None:
        script = self.script
        break_ = script.breaks.pop(0) if script.breaks else None
        if break_ and break_.after < 0:
            await self._end(break_, context)
            return
        await context.write(verify_pb2.DecodeResponse(admitted=verify_pb2.DecodeAdmitted(queue_s=0.25)))
        sent = first = len(request.committed_ids)
        stats, lengths = SpeculativeStats(), itertools.cycle(script.run_lengths)
        reason = FinishReason.LENGTH
        while sent < len(script.output) and (sent < request.max_tokens or script.ignores_limits):
            if break_ and sent - first >= break_.after:
                await self._end(break_, context)
                return
            await asyncio.sleep(script.delay_s)
            length = 1 if sent == first else next(lengths)
            run = list(script.output[sent : sent + length])
            if not script.ignores_limits:
                run = run[: request.max_tokens - sent]
                ends = [i for i, token in enumerate(run) if token in request.stop_token_ids]
                if ends:
                    run, reason = run[: ends[0] + 1], FinishReason.STOP
            record = None
            if sent > first:
                record = self._round(stats.num_rounds, len(request.prompt_ids) + sent, len(run))
                stats = stats.plus(record)
            position = len(request.prompt_ids) + sent + (script.position_error if sent > first else 0)
            await context.write(
                verify_pb2.DecodeResponse(
                    run=verify_pb2.DecodeRun(
                        position=position,
                        token_ids=run,
                        round=codec.round_to_pb(record) if record else None,
                    )
                )
            )
            sent += len(run)
            if reason is FinishReason.STOP:
                break
        if break_:
            await self._end(break_, context)
            return
        if script.holds_finished:
            await asyncio.sleep(3600)
        rounds = stats.num_rounds
        await context.write(
            verify_pb2.DecodeResponse(
                finished=verify_pb2.DecodeFinished(
                    finish_reason=codec.finish_to_pb(reason),
                    timings=codec.timings_to_pb(
                        Timings(
                            0.25, 0.5, 10.0 * rounds, 1.0 * rounds, 2.0 * rounds, 3.0 * rounds, 4.0 * rounds
                        )
                    ),
                    speculative=codec.stats_to_pb(stats),
                )
            )
        )

    def _round(self, index: int, base_len: int, length: int) -> RoundRecord:
        k = self.script.k
        outcome = ProposalOutcome.USED if k else ProposalOutcome.NONE
        accepted = min(k, length - 1)
        return RoundRecord(
            index, base_len, k, accepted, 0, length, outcome, "ngram" if k else "", 1, 1 + k,
            1.0, 2.0, 3.0, 4.0, 3.5, 0.5,
        )  # fmt: skip

    async def _end(self, break_: Break, context) -> None:
        if break_.silent or break_.transport:
            raise _EndOfStreamError(grpc.StatusCode.OK if break_.silent else break_.code)
        if break_.error is not None:
            raise break_.error
        await context.abort(break_.code, "scripted")


class RunningVerify:
    """A scripted replica that can die and come back on the same port."""

    def __init__(self, script: Script) -> None:
        self.servicer = ScriptedVerify(script)
        self.script = script
        self.port = 0
        self._server: TierServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        server = TierServer(ServerConfig(port=self.port), services=["paceline.v1.VerifyService"])
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self.servicer, server.grpc_server)
        await server.start()
        self._server, self.port = server, server.port

    async def stop(self) -> None:
        """Cut everything at once."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


@asynccontextmanager
async def scripted_verify(script: Script) -> AsyncIterator[RunningVerify]:
    running = RunningVerify(script)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


def router_config(endpoints: Sequence[str], *settings: str) -> PacelineConfig:
    return load_config(
        None,
        [
            f'model.name="{tokenizer_dir()}"',
            f"router.verify_endpoints={list(endpoints)}",
            "router.server.port=0",
            "router.holdout=0",  # no lots: what a test asks for it gets
            "router.guard.first_share=0",
            *settings,
        ],
    )


@asynccontextmanager
async def running_router(endpoints: Sequence[str], *settings: str) -> AsyncIterator[Client]:
    """A router in front of ``endpoints`` and a client of it."""
    config = router_config(endpoints, *settings)
    async with running_server(router.service.create_server, config) as address, Client(address) as client:
        yield client


@asynccontextmanager
async def pair(script: Script, *settings: str) -> AsyncIterator[tuple[Client, RunningVerify]]:
    """One replica, one router, one client."""
    async with (
        scripted_verify(script) as verify,
        running_router([verify.address], *settings) as client,
    ):
        yield client, verify


@dataclass
class Answer:
    started: Started
    chunks: list[Chunk]
    finished: Finished

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


async def ask(client: Client, *, metadata: Sequence[tuple[str, str]] = (), **request: Any) -> Answer:
    """One request to its end, with the shape of the stream checked."""
    if not {"text", "messages", "token_ids"} & set(request):
        request["text"] = "Hello"
    events = [
        event async for event in client.generate(generate_request(**request), timeout_s=60, metadata=metadata)
    ]
    started, *chunks, finished = events
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    answer = Answer(started, chunks, finished)
    position = 0
    for chunk in chunks:
        assert chunk.position == position
        position += len(chunk.token_ids)
    assert finished.usage.completion_tokens == position
    assert finished.usage.prompt_tokens == started.prompt_tokens
    return answer


async def _main(directory: str, port: str, ids: Sequence[str]) -> None:
    global tokenizer  # the process is given the directory, so that it need not import torch to make one
    loaded = Tokenizer.load(Path(directory))
    tokenizer = lambda: loaded  # noqa: E731
    running = RunningVerify(Script(output=[int(i) for i in ids], delay_s=0.05))
    running.port = int(port)
    await running.start()
    print(running.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], sys.argv[3:]))
