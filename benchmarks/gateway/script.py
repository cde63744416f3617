"""Makes the traffic of the gateway benchmark with a real tokenizer."""

from __future__ import annotations

import random

from benchmarks.conversation import prose
from benchmarks.gateway.traffic import MARKER, CannedCompletion, Case, Traffic
from lockstep.render import Renderer

PROMPTS = 32
"""Different prompts of ids per case, so that nothing is measured on one prompt only."""
PIECE = 128


def make(renderer: Renderer, cases: dict[str, Case]) -> Traffic:
    """The traffic of these cases, the same for the same tokenizer."""
    draw = random.Random(0)
    completions = {
        out: _completion_of(draw, renderer, out) for out in {case.out for case in cases.values()}
    }
    lengths = {case.prompt for case in cases.values() if not case.turns}
    most = min(len(renderer.tokenizer), 151_643)
    return Traffic(
        completions=completions,
        prompts={
            length: [[draw.randrange(most) for _ in range(length)] for _ in range(PROMPTS)]
            for length in lengths
        },
        turns={
            name: _messages(draw, renderer, case, completions[case.out].text)
            for name, case in cases.items()
            if case.turns
        },
    )


def _completion_of(draw: random.Random, renderer: Renderer, out: int) -> CannedCompletion:
    ids = renderer.encode(_text(draw, renderer, 2 * out))
    # Chat clients get a message without white space around it: so this one has none.
    while (text := renderer.tokenizer.decode(ids[: out - 1])) != text.strip():
        ids = ids[1:]
    ids = [*ids[: out - 1], renderer.stop_token_ids[0]]
    pieces = [renderer.tokenizer.decode([token]) for token in ids[:-1]]
    # As engines give them: 32-bit numbers, written with all the digits of the 64-bit one.
    logprobs = [-draw.randrange(1, 1 << 20) / (1 << 18) for _ in ids]
    return CannedCompletion(ids, logprobs, pieces)


def _messages(
    draw: random.Random, renderer: Renderer, case: Case, text: str
) -> list[dict[str, str]]:
    """A conversation in which each reply is `text`; its first message holds the marker."""
    growth = case.prompt // (case.turns - 1)
    made = [{"role": "user", "content": f"{MARKER} {_text(draw, renderer, case.prompt // 2)}"}]
    for turn in range(1, case.turns):
        made.append({"role": "assistant", "content": text})
        question = _text(draw, renderer, max(growth - case.out - 10, 8))
        made.append({"role": "user", "content": f"{turn}: {question}"})
    return made


def _text(draw: random.Random, renderer: Renderer, tokens: int) -> str:
    """About so many tokens. `prose` counts as it goes along: long texts are made of short ones."""
    parts = [prose(draw, renderer, min(tokens, PIECE)) for _ in range(-(-tokens // PIECE))]
    return " ".join(parts)
