"""Text and stops against a naive reference, for any chunking."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.testing.tiny_models import write_tiny_tokenizer
from paceline.tokenizer import Tokenizer
from paceline.types import FinishReason
from router.text import OutputText, StopScanner

ALPHABET = "ab€🙂 "
BYTES = sorted({byte for character in ALPHABET for byte in character.encode()})
STOP_TOKEN = 999


class ByteTokens:
    """A decode stream whose token ids are bytes: every character of more than one byte is split over tokens."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, token_id: int) -> str:
        self._held += bytes([token_id])
        try:
            text, self._held = self._held.decode(), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                text, self._held = self._held.decode(errors="replace"), b""
            else:
                text, self._held = self._held[: error.start].decode(), self._held[error.start :]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Naive: the first position where a stop string is complete, and the longest one that is."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def chunked(items, cuts):
    bounds = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


stops_ = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
cuts_ = st.lists(st.integers(0, 200), max_size=30)


@settings(max_examples=300, deadline=None)
@given(text=st.text(ALPHABET, max_size=40), stops=stops_, cuts=cuts_)
def test_the_scanner_equals_the_naive_search_for_any_chunking(text, stops, cuts) -> None:
    """The same cut and the same stop string, whatever the pieces; nothing of the cut part is ever shown."""
    expected = first_end(text, stops)
    whole = text if expected is None else text[: expected[0] - len(expected[1])]
    scanner, shown, stop = StopScanner(stops), "", None
    for piece in chunked(text, cuts):
        certain, stop = scanner.feed(piece)
        shown += certain
        assert whole.startswith(shown)
        if stop is not None:
            break
    else:
        shown += scanner.flush()
    assert shown == whole
    assert stop == (expected[1] if expected else None)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(ALPHABET, max_size=30),
    stops=stops_,
    cuts=cuts_,
    stop_token_at=st.none() | st.integers(0, 60),
    max_tokens=st.integers(1, 60),
)
def test_the_output_does_not_depend_on_the_runs(text, stops, cuts, stop_token_at, max_tokens) -> None:
    """Ids, text, reason and stop string, against decoding token by token from scratch."""
    ids = list(text.encode())
    if stop_token_at is not None:
        ids.insert(stop_token_at % (len(ids) + 1), STOP_TOKEN)
    expected = naive(ids, stops, max_tokens)
    output = OutputText(
        ByteTokens(), stops=stops, stop_token_ids=frozenset({STOP_TOKEN}), max_tokens=max_tokens
    )
    delivered, shown, end = 0, "", None
    for run in chunked(ids, cuts):
        part = output.push(run)
        assert part.num_ids <= len(run)
        delivered += part.num_ids
        shown += part.text
        if part.end is not None:
            end = part
            break
        assert part.num_ids == len(run)
    if end is None:
        end = output.finish(FinishReason.LENGTH)
        shown += end.text
    assert (delivered, shown, end.end, end.matched_stop) == expected


def naive(ids, stops, max_tokens):
    for count in range(1, len(ids) + 1):
        prefix = ids[:count]
        body = bytes(i for i in prefix if i != STOP_TOKEN)
        last = prefix[-1] == STOP_TOKEN or count == max_tokens
        certain = body.decode(errors="replace") if last else body.decode(errors="ignore")
        found = first_end(certain, stops)
        if found:
            return count, certain[: found[0] - len(found[1])], FinishReason.STOP, found[1]
        if prefix[-1] == STOP_TOKEN:
            return count, certain, FinishReason.STOP, None
        if last:
            return count, certain, FinishReason.LENGTH, None
    return len(ids), bytes(ids).decode(), FinishReason.LENGTH, None


@pytest.mark.parametrize(
    ("stops", "shown"),
    [(["abcd", "bc"], "xa"), (["bcd", "abcd"], "x"), (["cd", "d"], "xab"), (["abcde"], "xabcd")],
)
def test_of_several_stop_strings_the_first_complete_one_counts_then_the_longest(stops, shown) -> None:
    """Independent of the order they are given in."""
    for order in (stops, stops[::-1]):
        scanner = StopScanner(order)
        text, stop = scanner.feed("xabcd")
        assert text + ("" if stop else scanner.flush()) == shown


def test_incomplete_bytes_at_the_end_may_complete_a_stop_string() -> None:
    """U+FFFD is a character like any other."""
    output = OutputText(ByteTokens(), stops=["a\ufffd"], stop_token_ids=frozenset(), max_tokens=2)
    part = output.push([ord("a"), 0xF0])
    assert (part.text, part.num_ids, part.end, part.matched_stop) == ("", 2, FinishReason.STOP, "a\ufffd")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), cuts=cuts_)
def test_with_a_real_tokenizer_any_ids_in_any_runs_give_the_text_decoded_at_once(
    data, cuts, tokenizer
) -> None:
    """Special tokens, halves of characters and bytes that are no text included."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stop = data.draw(st.text("ae \ufffdé", min_size=1, max_size=3))
    whole = tokenizer.decode(ids)
    output = OutputText(
        tokenizer.decode_stream(), stops=[stop], stop_token_ids=frozenset(), max_tokens=len(ids) + 1
    )
    shown, matched = "", None
    for run in chunked(ids, cuts):
        part = output.push(run)
        shown, matched = shown + part.text, part.matched_stop
        if part.end:
            break
    else:
        part = output.finish(FinishReason.LENGTH)
        shown, matched = shown + part.text, part.matched_stop
    assert shown == (whole.split(stop)[0] if stop in whole else whole)
    assert matched == (stop if stop in whole else None)
