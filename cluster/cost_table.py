"""``paceline costs``: what a step costs, as a verify replica has measured it and as it sees it now."""

from collections.abc import Iterator, Sequence

import grpc

from paceline.errors import ConfigError, IncompatiblePeerError
from paceline.serving.channel import error_from_rpc, open_channel
from paceline.step_costs import CostTable, table_of
from paceline.v1 import verify_pb2, verify_pb2_grpc


async def cost_lines(address: str) -> list[str]:
    """The table of the verify replica at ``address``. Raises PeerLostError when nobody is there."""
    info = await _info(address)
    if not info.HasField("costs"):
        return [f"{address}: nothing was measured (verify.cost_budget_s = 0)"]
    return list(_lines(info.model.name, info.costs))


async def cost_table(address: str) -> CostTable:
    """The same as a value: what steps take now where it was seen. Raises ConfigError where nothing was measured."""
    info = await _info(address)
    if not info.HasField("costs"):
        raise ConfigError(f"{address}: nothing was measured (verify.cost_budget_s = 0)")
    costs = info.costs
    return table_of(
        [(point.sequences, point.rows, point.now_s or point.step_s) for point in costs.points],
        context=costs.context,
        row_key_s=costs.row_key_s,
        sequence_key_s=costs.sequence_key_s,
        origin=f"of {info.model.name} at {address}",
    )


async def _info(address: str) -> verify_pb2.GetModelInfoResponse:
    async with open_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        try:
            return await stub.GetModelInfo(verify_pb2.GetModelInfoRequest(), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise IncompatiblePeerError(
                    f"{address} is not the verify tier, which alone knows what a step costs (by default 127.0.0.1:7441)"
                ) from error
            raise error_from_rpc(error) from error


def _lines(model: str, costs: verify_pb2.StepCosts) -> Iterator[str]:
    yield f"{model}: ms a step with {costs.context} tokens of context, {costs.origin}"
    yield "in brackets what it would take now: the same at the pace of the steps served lately"
    by_count: dict[int, list[verify_pb2.StepCost]] = {}
    for point in costs.points:
        by_count.setdefault(point.sequences, []).append(point)
    for sequences, points in sorted(by_count.items()):
        yield f"{sequences} {'sequence' if sequences == 1 else 'sequences'}"
        yield from _rows(points)
    far = 1e3 * 1024
    yield (
        f"each further 1,024 tokens of context: {far * costs.row_key_s:.2f} ms a row, "
        f"{far * costs.sequence_key_s:.2f} ms a sequence"
    )


def _rows(points: Sequence[verify_pb2.StepCost]) -> Iterator[str]:
    plain_s = points[0].step_s
    for point in points:
        now = "" if abs(point.now_s / point.step_s - 1) < 0.02 else f"  ({1e3 * point.now_s:.2f})"
        noun = "row " if point.rows == 1 else "rows"
        yield f"  {point.rows:>4} {noun} {1e3 * point.step_s:>8.2f}  {point.step_s / plain_s:>5.2f}x{now}"
