"""What is believed of acceptance: changes of the text are noticed, chance is not taken for one, and deep positions are tried again."""

import random

from verify_service.allocation import look_cost
from verify_service.belief import DEPTHS, DrafterTrack, Look, Track, View, looked_at, waited_for
from verify_service.facts import RowFact


def rounds(track: Track, drafter: DrafterTrack, blocks, k: int = 4) -> list[float]:
    """Acceptance as believed after each block, of which so many tokens were right."""
    found = []
    for agreed in blocks:
        waited_for(track, drafter, View(drafter.copy()), k, k, k, agreed, None)
        found.append(View(drafter.copy()).acceptance(track, None))
    return found


def drawn(chance: float, count: int, seed: int, k: int = 4) -> list[int]:
    source = random.Random(seed)
    blocks = []
    for _ in range(count):
        agreed = 0
        while agreed < k and source.random() < chance:
            agreed += 1
        blocks.append(agreed)
    return blocks


def test_a_text_that_changes_is_noticed() -> None:
    """A hundred good rounds, then none is right: half believed within ten rounds, and back as soon."""
    track, drafter = Track("d"), DrafterTrack()
    assert rounds(track, drafter, drawn(0.9, 100, 1))[-1] > 0.8
    fallen = rounds(track, drafter, [0] * 10)
    assert fallen[-1] < 0.45
    assert fallen[0] > 0.7  # one miss is chance
    rounds(track, drafter, [0] * 60)
    assert rounds(track, drafter, [4] * 8)[-1] > 0.6


def test_chance_is_not_taken_for_a_change() -> None:
    """Of a steady text what was counted is thrown away in fewer than one round of a hundred."""
    dropped = 0
    for seed in range(8):
        track, drafter = Track("d"), DrafterTrack()
        for agreed in drawn(0.7, 500, seed):
            before = track.accepted + track.rejected
            waited_for(track, drafter, View(drafter.copy()), 4, 4, 4, agreed, None)
            dropped += track.accepted + track.rejected < 0.5 * before
    assert dropped < 40


def test_a_bad_start_at_a_deep_position_is_forgotten() -> None:
    """Position 4 failed when it was tried; blocks of three that are all right give it another chance."""
    track, drafter = Track("d"), DrafterTrack()
    for _ in range(40):
        waited_for(track, drafter, View(drafter.copy()), 4, 4, 4, 3, None)
    assert View(drafter.copy()).profile[3] < 0.2
    for _ in range(200):
        waited_for(track, drafter, View(drafter.copy()), 3, 3, 3, 3, None)
    assert View(drafter.copy()).profile[3] > 0.6
    assert len(drafter.seen) == DEPTHS


def test_what_a_look_took_is_parted_into_reading_and_guessing() -> None:
    """The first one reads the prompt; an outlier moves neither by much."""
    track, drafter = Track("d"), DrafterTrack()
    for look in (Look(4, 2, 1, 10, 0.004), Look(4, 2, 1, 1000, 0.104), Look(4, 2, 1, 10, 5.0)):
        looked_at(track, drafter, View(drafter.copy()), look, 4, None)
    assert abs(drafter.read_s - 1e-4) < 1e-12
    assert 0.004 < drafter.look_s < 0.008


def test_a_look_is_cheaper_in_company_and_dearer_where_much_is_unread() -> None:
    """Rounds between two looks: a batch is shared, a prompt is not."""
    drafter = DrafterTrack(look_s=0.004, read_s=1e-4)

    def rounds_between(unread: int, company: int) -> int:
        row = RowFact(1, "d", 4, 100, False, 0, -1, 0, 0, None, None, False, unread=unread)
        return look_cost(View(drafter), row, 0.005, 1, company)[1]

    assert rounds_between(5, 0) > 2 * rounds_between(5, 3)
    assert rounds_between(1000, 3) > 10 * rounds_between(5, 3)
