"""The tokenize benchmark compares ids, and ours are those of plain transformers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import tokenizing
from lockstep.models import bundled
from lockstep.render import Renderer


def test_the_route_gives_the_ids_of_plain_transformers(tmp_path: Path) -> None:
    model = bundled("tiny")
    assert model is not None
    plain, renderer = AutoTokenizer.from_pretrained(model), Renderer.load("tiny")
    with tokenizing.lockstep(tmp_path, model) as ours:
        for chat in islice(tokenizing.longer(renderer), 3):
            spent, ids = ours.tokenize(chat)
            text = plain.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            assert ids == plain.encode(text, add_special_tokens=False)
            assert spent > 0


class Fixed(tokenizing.Contestant):
    """Gives the ids it was made with, for no CPU at all."""

    def tokenize(self, chat: tokenizing.Chat) -> tuple[float, list[int]]:
        return 1.0, [self.port]


def test_servers_that_disagree_are_not_compared() -> None:
    chats = iter([[{"role": "user", "content": "hi"}]] * 20)
    same = tokenizing.compared(Fixed(1, 0), Fixed(1, 1), "x", chats)
    assert same.ratio == 1
    with pytest.raises(RuntimeError, match="different ids"):
        tokenizing.compared(Fixed(1, 0), Fixed(2, 1), "x", chats)
