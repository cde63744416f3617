"""Token strings lose nothing, not even half a character."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.render import Renderer
from lockstep.tokens.errors import BadTokenId

TEXT = "naïve 🙂 数字\n\t  x  "


@pytest.mark.failure_mode("F40")
@pytest.mark.parametrize("name", ["tiny", "qwen3", "llama3_2", "deepseek_v3", "gemma3"])
def test_pieces_add_up_to_the_text(name: str, real_tokenizer: Callable[[str], Path]) -> None:
    renderer = Renderer.load(name if name == "tiny" else real_tokenizer(name))
    ids = renderer.encode(TEXT)
    assert b"".join(renderer.pieces.data(token) for token in ids) == TEXT.encode()
    assert renderer.decode(ids) == TEXT


@pytest.mark.failure_mode("F40")
def test_parts_of_a_character_have_strings_of_their_own(renderer: Renderer) -> None:
    ids = renderer.encode("🙂")
    assert len(ids) == 4
    pieces = [renderer.pieces.piece(token) for token in ids]
    assert [piece.text for piece in pieces] == [
        "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"
    ]  # fmt: skip
    assert b"".join(piece.data for piece in pieces).decode() == "🙂"


@pytest.mark.failure_mode("F40")
@given(text=st.text(max_size=60), cut=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_a_stream_gives_each_character_once_and_whole(text: str, cut: int) -> None:
    renderer = Renderer.load("tiny")
    ids = renderer.encode(text)
    stream = renderer.pieces.stream()
    parts = [stream.feed(ids[at : at + cut]) for at in range(0, len(ids), cut)]
    assert "".join(parts) + stream.feed([], last=True) == renderer.decode(ids)
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


def test_special_tokens_are_text(renderer: Renderer) -> None:
    close = renderer.stop_token_ids[0]
    assert renderer.pieces.piece(close).text == "<|im_end|>"


@pytest.mark.parametrize("token", [512, 10**9, -1])
def test_an_unknown_id_is_an_error(renderer: Renderer, token: int) -> None:
    with pytest.raises(BadTokenId, match=str(token)):
        renderer.decode([token])
