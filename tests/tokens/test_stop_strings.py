"""Stop strings: found in the token that completes them, cut as OpenAI does, held in streams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens.stop_strings import HeldText, StopMatch, StopMatcher

TEXTS = st.text(alphabet="abé\n", max_size=40)
STOPS = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=4), min_size=1, max_size=3)


def text_before_stop(pieces: Sequence[bytes], stop: str, *, include: bool = False) -> str:
    """Return the text of tokens whose last one completed `stop`, cut where the stop string begins.

    With `include`, cut where it ends.
    """
    text, wanted = b"".join(pieces), stop.encode()
    before = len(text) - (len(pieces[-1]) if pieces else 0)
    at = text.find(wanted, max(0, before - len(wanted) + 1))
    if at < 0:  # a special token that is not part of the text
        return text.decode(errors="replace")
    return text[: at + len(wanted) * include].decode(errors="replace")


def fed(stops: list[str], pieces: list[bytes]) -> tuple[int, StopMatch] | None:
    matcher = StopMatcher(stops)
    for at, piece in enumerate(pieces):
        if match := matcher.feed(piece):
            return at, match
    return None


@pytest.mark.parametrize(
    ("stops", "pieces", "at", "match"),
    [
        (["END"], [b"a ", b"E", b"N", b"Dx"], 3, StopMatch("END", 3)),
        (["\n\n"], [b"a\n", b"b\n", b"\n"], 2, StopMatch("\n\n", 2)),
        (["b"], [b"abc"], 0, StopMatch("b", 1)),
        (["bc", "ab"], [b"abc"], 0, StopMatch("ab", 1)),
        (["é"], [b"x\xc3", b"\xa9y"], 1, StopMatch("é", 2)),
        (["aab"], [b"a", b"a", b"a", b"b"], 3, StopMatch("aab", 3)),
        (["ab"], [b"a", b"", b"b"], 2, StopMatch("ab", 3)),
    ],
)
def test_the_token_that_completes_the_string_is_found_with_those_that_hold_it(
    stops: list[str], pieces: list[bytes], at: int, match: StopMatch
) -> None:
    assert fed(stops, pieces) == (at, match)


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=20))
def test_it_is_found_wherever_the_tokens_are_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    result = fed(stops, pieces)
    ends = [data.find(stop.encode()) + len(stop.encode()) for stop in stops if stop in text]
    if not ends:
        assert result is None
        return
    assert result is not None
    at, match = result
    assert edges[at] < min(ends) <= edges[at + 1]
    shown = text_before_stop(pieces[: at + 1], match.stop)
    assert data.startswith(shown.encode() + match.stop.encode())
    first = at + 1 - match.tokens
    assert edges[first] <= data.index(match.stop.encode()) < edges[first + 1]


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=20), st.booleans())
def test_a_stream_shows_what_the_whole_text_shows(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    data = text.encode()
    marks = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(marks)]
    match = fed(stops, [piece.encode() for piece in pieces])
    last = len(pieces) - 1 if match is None else match[0]
    held = HeldText(stops)
    shown = "".join(held.feed(piece) for piece in pieces[: last + 1])
    shown += held.finish(None if match is None else match[1].stop, include=include)
    whole = text
    if match is not None:
        encoded = [piece.encode() for piece in pieces[: last + 1]]
        whole = text_before_stop(encoded, match[1].stop, include=include)
    assert shown == whole
    assert data.startswith(shown.encode())


def test_what_may_become_a_stop_string_is_held_and_let_go_when_it_does_not() -> None:
    held = HeldText(["STOP"])
    assert [held.feed(part) for part in ("a S", "TO", "x ST", "OP")] == ["a ", "", "STOx ", ""]
    assert held.feed("more") == "STOPmore", "the engine went on: it was before min_tokens"
    assert held.finish(None) == ""


def test_a_token_without_text_does_not_let_a_stop_string_go() -> None:
    held = HeldText(["STOP"])
    assert [held.feed(part) for part in ("a STOP", "")] == ["a ", ""]
    assert held.finish("STOP") == ""


def test_a_special_token_as_stop_string_cuts_nothing_from_the_text() -> None:
    assert text_before_stop([b"whole", b""], "<|im_end|>") == "whole"
