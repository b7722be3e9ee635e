"""Who is next in line for memory."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.types import Plan, SamplingParams
from verify_service.sequence import DecodeSpec, Sequence
from verify_service.waiting import WaitingLine


def sequence(number: int, tenant: str = "", priority: int = 0) -> Sequence:
    spec = DecodeSpec(
        str(number), (1,), (), SamplingParams(), 1, frozenset(), Plan.plain("test"), None, tenant, priority
    )
    return Sequence(number, spec, lambda event: None, arrived=0.0)


def order(line: WaitingLine) -> list[int]:
    return [line.pop().id for _ in range(len(line))]


def test_first_come_first_served_within_a_tenant() -> None:
    """The order of arrival."""
    line = WaitingLine()
    for number in range(4):
        line.add(sequence(number))
    assert order(line) == [0, 1, 2, 3]


def test_tenants_take_turns() -> None:
    """A flood of one tenant delays its own requests only."""
    line = WaitingLine()
    for number in range(4):
        line.add(sequence(number, "flood"))
    line.add(sequence(10, "a"))
    line.add(sequence(20, "b"))
    line.add(sequence(21, "b"))
    assert order(line) == [0, 10, 20, 1, 21, 2, 3]


def test_higher_priority_goes_first() -> None:
    """Whatever stands in line before it."""
    line = WaitingLine()
    for number, priority in enumerate((0, -5, 3, 0, 3)):
        line.add(sequence(number, priority=priority))
    assert order(line) == [2, 4, 0, 3, 1]


def test_one_that_gave_way_goes_on_before_its_tenants_others() -> None:
    """In front of its own line."""
    line = WaitingLine()
    line.add(sequence(0))
    line.add(sequence(1), in_front=True)
    assert order(line) == [1, 0]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(-1, 1)), max_size=40))
def test_nobody_is_lost(events: list[tuple[bool, str, int]]) -> None:
    """Added, removed and popped in any order: the length is right and everyone comes out once."""
    line = WaitingLine()
    inside: dict[int, Sequence] = {}
    for number, (add, tenant, priority) in enumerate(events):
        if add or not inside:
            inside[number] = sequence(number, tenant, priority)
            line.add(inside[number])
        elif number % 2:
            line.remove(inside.pop(next(iter(inside))))
        else:
            del inside[line.pop().id]
        assert len(line) == len(inside) == len(list(line))
    assert sorted(order(line)) == sorted(inside)
    assert line.first() is None
