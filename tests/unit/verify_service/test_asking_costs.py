"""What asking a drafter is believed to cost."""

from verify_service.belief import FIRST_EXPOSED_S, DrafterTrack, timed, unasked


def test_one_slow_answer_does_not_settle_what_asking_costs() -> None:
    """A drafter that had a prompt to read first is asked again: its first answer is an outlier like any other."""
    drafter = DrafterTrack()
    timed(drafter, 0.1, 0.1, 4)
    assert drafter.exposed_s < 0.002
    for _ in range(20):
        timed(drafter, 0.001, 0.0008, 4)
    assert 0.0009 < drafter.exposed_s < 0.0012


def test_a_dear_drafter_is_known_to_be_dear_after_some_answers() -> None:
    """The truth is reached from below within a dozen answers."""
    drafter = DrafterTrack()
    for _ in range(16):
        timed(drafter, 0.024, 0.024, 4)
    assert drafter.exposed_s > 0.018


def test_what_is_not_asked_is_forgotten() -> None:
    """A drafter that looked dear looks cheap enough to be tried after a while, and a cheap one does not look dearer."""
    dear, cheap = DrafterTrack(exposed_s=0.1), DrafterTrack(exposed_s=1e-4)
    for _ in range(800):
        unasked(dear)
        unasked(cheap)
    assert dear.exposed_s < 2 * FIRST_EXPOSED_S
    assert cheap.exposed_s == 1e-4
