"""A real router server with a script in place of models: what the client and the command line are tested against."""

import asyncio

import grpc

from paceline import codec
from paceline.config import PacelineConfig
from paceline.errors import CapacityError, EngineError, FieldViolation, InvalidRequestError
from paceline.serving import TierServer
from paceline.types import (
    FinishReason,
    ModelInfo,
    Plan,
    ProposalOutcome,
    RoundRecord,
    SpeculativeStats,
    Timings,
)
from paceline.v1 import common_pb2, router_pb2, router_pb2_grpc

SPECULATIVE = Plan.speculative("ngram", 4, "answers repeat their question")
ROUNDS = tuple(
    RoundRecord(
        i, 10 + 2 * i, 4, 1, 0, 2, ProposalOutcome.USED, "ngram", 1, 5, 0.001, 0.002, 0.0, 0.03, 0.028, 0.001
    )
    for i in range(3)
)
TIMINGS = Timings(0.001, 0.05, 0.1, 0.003, 0.006, 0.0, 0.09, 0.06, 0.2)
INFO = ModelInfo("tiny", "f", "t", 512, 256, "float32", "cpu", "reference", "any model", "deterministic")
USAGE = router_pb2.Usage(prompt_tokens=9, completion_tokens=7, cached_prompt_tokens=5)


def stats() -> SpeculativeStats:
    total = SpeculativeStats()
    for record in ROUNDS:
        total = total.plus(record)
    return total


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """The prompt says what happens: ``wrong``, ``full``, ``broken``, ``forever``, ``lot`` (plain by lot); anything else is answered."""

    def __init__(self, *, drifts: bool = False, plain: bool = False) -> None:
        self.drifts = drifts  # speculative output differs in its last token
        self.plain = plain  # its own decision
        self.requests: list[router_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request, context: grpc.aio.ServicerContext) -> None:
        self.requests.append(request)
        turns = request.chat.messages
        prompt = request.text or (turns[-1].content if turns else "")
        mode = request.decoding.mode
        plain = mode == common_pb2.DECODING_MODE_PLAIN or (
            (self.plain or prompt == "lot") and mode == common_pb2.DECODING_MODE_UNSPECIFIED
        )
        plan = Plan.plain("asked for") if plain else SPECULATIVE
        if request.HasField("max_tokens") and request.max_tokens == 0:
            raise InvalidRequestError(
                [
                    FieldViolation("max_tokens", "0; expected at least 1"),
                    *([FieldViolation("sampling.top_p", "3.0; wrong")] if request.sampling.top_p > 1 else []),
                    *([] if prompt else [FieldViolation("tokens.ids", "empty; give at least one token id")]),
                ]
            )
        if prompt == "wrong":
            raise InvalidRequestError(
                [FieldViolation("sampling.temperature", "-1: at least 0"), FieldViolation("stop[0]", "empty")]
            )
        if prompt == "full":
            raise CapacityError("queue is full: 256 wait", retry_after_s=1.0)
        started = router_pb2.GenerateStarted(
            request_id="req-1",
            task_type=request.task_type or "qa",
            plan=codec.plan_to_pb(plan),
            prompt_tokens=9,
            seed=request.sampling.seed,
            decision=router_pb2.Decision(arm="holdout") if prompt == "lot" and plain else None,
        )
        await context.write(router_pb2.GenerateResponse(started=started))
        for index, text in enumerate(["Blå", "bær ", f"[{prompt}]"]):
            token = 99 if self.drifts and index == 2 and plan is SPECULATIVE else index
            chunk = router_pb2.GenerateChunk(text=text, token_ids=[token], position=index)
            if index:
                chunk.round = index - 1
            await context.write(router_pb2.GenerateResponse(chunk=chunk))
            if prompt == "broken":
                raise EngineError("step failed")
        if prompt == "forever":
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()
        if prompt == "silent":
            return
        finished = router_pb2.GenerateFinished(
            finish_reason=codec.finish_to_pb(FinishReason.LENGTH),
            usage=USAGE,
            timings=codec.timings_to_pb(TIMINGS),
            speculative=codec.stats_to_pb(stats()),
            plan=codec.plan_to_pb(plan),
            numerics="deterministic",
        )
        await context.write(router_pb2.GenerateResponse(finished=finished))

    async def ListRequests(
        self, request, context: grpc.aio.ServicerContext
    ) -> router_pb2.ListRequestsResponse:
        summary = router_pb2.RequestSummary(
            request_id="req-1",
            task_type="qa",
            plan=codec.plan_to_pb(SPECULATIVE),
            outcome="length",
            usage=USAGE,
            timings=codec.timings_to_pb(TIMINGS),
            speculative=codec.stats_to_pb(stats()),
            rounds=[codec.round_to_pb(record) for record in ROUNDS],
        )
        if request.request_id not in ("", "req-1"):
            return router_pb2.ListRequestsResponse()
        return router_pb2.ListRequestsResponse(
            requests=[summary] * (1 if request.request_id else min(request.limit or 20, 2))
        )

    async def GetServerInfo(
        self, request, context: grpc.aio.ServicerContext
    ) -> router_pb2.GetServerInfoResponse:
        return router_pb2.GetServerInfoResponse(
            version="9.9",
            model=codec.model_info_to_pb(INFO),
            drafters=[
                common_pb2.DrafterInfo(name="ngram", version="1", available=True),
                common_pb2.DrafterInfo(name="small", version="2"),
            ],
            task_types=["qa", "coding"],
            default_max_tokens=256,
        )


async def create_server(config: PacelineConfig) -> TierServer:
    server = TierServer(config.router.server, services=["paceline.v1.RouterService"])
    router_pb2_grpc.add_RouterServiceServicer_to_server(ScriptedRouter(), server.grpc_server)
    return server
