"""When a drafter is asked, and when it is left alone."""

from verify_service.breaker import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, MISSES, WINDOW, Breaker


def breaker() -> Breaker:
    return Breaker(jitter=lambda: 0.5)  # back-off exactly as named


def test_opens_after_three_misses_in_the_window() -> None:
    """Two misses are forgiven, the third is not."""
    b = breaker()
    assert [b.missed(0.0) for _ in range(MISSES)] == [False, False, True]
    assert b.is_open
    assert not b.may_attach(FIRST_BACKOFF_S / 2)


def test_misses_outside_the_window_are_forgotten() -> None:
    """Sixteen answers wash a miss away."""
    b = breaker()
    for _ in range(5):
        assert not b.missed(0.0)
        for _ in range(WINDOW):
            b.answered()


def test_half_open_lets_one_probe_through_and_its_answer_closes() -> None:
    """After the back-off one sequence may ask; when it is answered all may."""
    b = breaker()
    for _ in range(MISSES):
        b.missed(0.0)
    assert b.may_attach(FIRST_BACKOFF_S)
    assert not b.may_attach(FIRST_BACKOFF_S)
    b.answered()
    assert not b.is_open
    assert b.may_attach(FIRST_BACKOFF_S)


def test_missed_probe_opens_again_for_longer() -> None:
    """The back-off doubles up to its bound."""
    b = breaker()
    for _ in range(MISSES):
        b.missed(0.0)
    now, expected = 0.0, FIRST_BACKOFF_S
    for _ in range(6):
        assert not b.may_attach(now + 0.99 * expected)
        assert b.may_attach(now + expected)
        now += expected
        assert b.missed(now)
        expected = min(2 * expected, LONGEST_BACKOFF_S)


def test_probe_that_ends_without_a_verdict_frees_the_place() -> None:
    """The probing sequence was cancelled: the next one may probe at once."""
    b = breaker()
    for _ in range(MISSES):
        b.missed(0.0)
    assert b.may_attach(1.0)
    b.probe_ended(1.1)
    assert b.is_open
    assert b.may_attach(1.1)
