"""Token strings lose nothing, not even half a character."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.text.vocabulary import Vocabulary
from lockstep.models import bundled
from lockstep.render import Renderer, TokenBytes
from tests import tokenizers

TEXT = "naïve 🙂 数字\n\t  x  <|im_end|></s>"
SPACE_FIRST = ("llama2", "yi", "baichuan2", "chatglm3", "internlm2")


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


@pytest.mark.failure_mode("F40")
@pytest.mark.parametrize("name", ["tiny", *tokenizers.PACKAGES])
def test_bytes_of_every_npm_tokenizer_join_to_the_text(
    name: str, real_tokenizer: Callable[[str], Path]
) -> None:
    place = bundled("tiny") if name == "tiny" else real_tokenizer(name)
    vocabulary = Vocabulary(place)
    size = vocabulary.tokenizer.get_vocab_size()
    pieces = [vocabulary.bytes_of(token) for token in range(size + 8)]
    assert pieces[size + 7] == b""
    ids = vocabulary.tokenizer.encode(TEXT, add_special_tokens=False).ids
    joined = b"".join(pieces[token] for token in ids)
    # SentencePiece puts a space before the first word, which its decoder takes away again.
    assert joined.removeprefix(b" " if name in SPACE_FIRST else b"") == TEXT.encode()


@pytest.mark.failure_mode("F40")
def test_plain_text_in_a_byte_level_vocabulary_has_its_own_bytes(
    real_tokenizer: Callable[[str], Path],
) -> None:
    renderer = Renderer.load(real_tokenizer("command_r_plus"))
    assert renderer.pieces.piece(265).text == "\u203c"  # not a character of the byte alphabet


@pytest.mark.failure_mode("F40")
@pytest.mark.parametrize("token", [512, 10**9, -1])
def test_an_id_without_a_token_has_no_bytes(renderer: Renderer, token: int) -> None:
    assert token not in renderer.pieces
    assert renderer.pieces.piece(token) == TokenBytes(b"", "")
    assert renderer.decode([token, *renderer.encode("a")]) == "a"
