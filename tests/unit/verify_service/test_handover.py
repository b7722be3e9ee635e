"""From one thread to the event loop: in order, nothing lost, nothing left."""

import asyncio
import threading
from pathlib import Path

import pytest

from verify_service import handover
from verify_service.handover import Handover


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["kept", "without event descriptors"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "kept":
        monkeypatch.setattr(handover, "_write_kept", lambda: None)


@pytest.mark.usefixtures("_way")
async def test_all_that_is_given_is_taken_in_order() -> None:
    """Also what is given just before the end."""
    taken: list[int] = []
    over = Handover(asyncio.get_running_loop(), taken.append)
    over.open()

    def give() -> None:
        for number in range(10_000):
            over.give(number)
        over.close()

    thread = threading.Thread(target=give)
    thread.start()
    async with asyncio.timeout(10):
        while len(taken) < 10_000:
            await asyncio.sleep(0)
    thread.join()
    assert taken == list(range(10_000))


async def test_descriptors_are_given_back() -> None:
    """Fifty of them come and go."""
    loop, before = asyncio.get_running_loop(), _num_descriptors()
    for _ in range(50):
        over = Handover(loop, print)
        over.open()
        over.close()
    await asyncio.sleep(0.05)
    assert _num_descriptors() <= before


async def test_one_that_fails_to_be_taken_is_the_last_of_nothing() -> None:
    """What comes behind it is taken all the same."""
    taken: list[int] = []
    failed: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))

    def take(number: int) -> None:
        if number == 1:
            raise ValueError(number)
        taken.append(number)

    over = Handover(loop, take)
    over.open()
    for number in range(4):
        over.give(number)
    await asyncio.sleep(0.05)
    over.close()
    await asyncio.sleep(0.05)
    assert taken == [0, 2, 3]
    assert len(failed) == 1
