"""The fast tokenizer: the ids of the whole one, in less time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.render import Renderer
from lockstep.render.fast_tokenizer import LONG, FastTokenizer

PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["<|im_start|>", "<|im_end|>", "user\n", " 1 + 2", "\n\n", "é🙂", "<think>"]
        ),
        st.text(max_size=30),
    ),
    max_size=20,
)


@given(pieces=PIECES, times=st.sampled_from([1, 1, 1, 40]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_length_of_text_has_the_ids_of_the_tokenizer(pieces: list[str], times: int) -> None:
    own = Renderer.load("tiny").tokenizer
    text = "".join(pieces).encode(errors="ignore").decode() * times
    expected = own.encode(text, add_special_tokens=False)
    assert FastTokenizer(own).encode(text, add_special_tokens=False) == expected


def test_a_text_for_segments_has_them_too(renderer: Renderer) -> None:
    text = "<|im_start|>user\nOne and two.<|im_end|>\n" * (LONG // 30)
    expected = renderer.tokenizer.encode(text, add_special_tokens=False)
    assert FastTokenizer(renderer.tokenizer).encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("mark", ["<|im_end|>", "<think>", "no mark at all", ["<think>", "x"]])
def test_marks_have_the_ids_of_the_tokenizer(renderer: Renderer, mark: str | list[str]) -> None:
    fast = FastTokenizer(renderer.tokenizer)
    for _ in range(2):
        assert fast.convert_tokens_to_ids(mark) == renderer.tokenizer.convert_tokens_to_ids(mark)
    assert fast.unk_token_id == renderer.tokenizer.unk_token_id
