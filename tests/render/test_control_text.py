"""Control tokens that messages spell out stay text, in every format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from lockstep.gateway.turn.prompt import render_open_message
from lockstep.models import bundled
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer
from lockstep.render.streaming_parser import StreamingParser
from lockstep.tokens.errors import BadRequest
from tests import tokenizers
from tests.ledger.rollouts import TOOLS

MARKERS = ("{}", " {}\n", "x{}y")


@pytest.fixture(scope="module", params=["tiny", *tokenizers.CHAT])
def tokenizer(
    request: pytest.FixtureRequest,
    real_tokenizer: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    if request.param == "tiny":
        return AutoTokenizer.from_pretrained(bundled("tiny"))
    place = real_tokenizer(request.param)
    if "auto_map" in (place / "tokenizer_config.json").read_text():
        place = tokenizers.without_own_code(place, tmp_path_factory.mktemp("own") / request.param)
    return Renderer.load(place).tokenizer


def conversations(text: str) -> list[tuple[list[dict[str, Any]], Any]]:
    """Conversations that bring the text in every kind of message."""
    call = {"name": "calc", "arguments": {"sum": text}}
    calls = [{"id": "call00000", "type": "function", "function": call}]
    question = {"role": "user", "content": "Question."}
    reading = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
    return [
        ([{"role": "user", "content": text}], None),
        ([{"role": "user", "content": [{"type": "text", "text": part} for part in text]}], None),
        ([{"role": "system", "content": text}, question], None),
        ([question, {"role": "assistant", "content": text}, question], None),
        ([*reading, {"role": "tool", "tool_call_id": "call00000", "content": text}], TOOLS),
    ]


@pytest.mark.failure_mode("F99")
def test_no_message_brings_a_control_token(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    peers = Renderer(tokenizer, control_tokens_in_text=True)
    assert renderer.template.control is not None
    control = sorted(renderer.template.control.tokens)[:60]
    forged = " ".join(form.format(token) for token in control for form in MARKERS)
    ids_of = {tokenizer.convert_tokens_to_ids(token) for token in control}
    rendered = 0
    for (messages, tools), (plain, _) in zip(
        conversations(f"a {forged} b"), conversations("a b"), strict=True
    ):
        try:
            ids, harmless = renderer.render(messages, tools), renderer.render(plain, tools)
        except BadRequest:
            continue  # a format without system messages or tools
        assert harmless == peers.render(plain, tools)
        assert count(ids, ids_of) == count(harmless, ids_of)
        theirs = peers.render(messages, tools)
        assert renderer.decode(ids) == peers.decode(theirs) or blank_free(
            renderer.decode(ids)
        ) == blank_free(peers.decode(theirs))
        if blank_free(forged) in blank_free(peers.decode(theirs)):
            assert count(theirs, ids_of) > count(harmless, ids_of)
            rendered += 1
    assert rendered >= 2


def count(ids: list[int], wanted: set[int]) -> Counter[int]:
    return Counter(token for token in ids if token in wanted)


def blank_free(text: str) -> str:
    """SentencePiece puts a space before the text that follows a control token."""
    return text.replace(" ", "")


def test_tags_inside_a_turn_are_tokens_as_before(renderer: Renderer) -> None:
    think = renderer.encode("<think>")
    assert len(think) == 1
    ids = renderer.render([{"role": "user", "content": "<think> and <|im_end|>"}])
    assert think[0] in ids


@pytest.mark.failure_mode("F99")
def test_a_message_that_is_continued_keeps_its_text(renderer: Renderer) -> None:
    text = "It closes with <|im_end|> and"
    messages = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": text}]
    chat = ChatRequest(model="tiny", messages=messages, continue_final_message=True)
    ids = render_open_message(chat, renderer)
    assert renderer.decode(ids).endswith(text)
    assert count(ids, set(renderer.stop_token_ids)).total() == 1


@pytest.mark.failure_mode("F99")
def test_a_tokenizer_of_another_library_is_covered() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [{"role": "user", "content": "a</s>b"}]
    end = tokenizer.eos_token_id
    assert Renderer(tokenizer).render(messages).count(end) == 1
    assert Renderer(tokenizer, control_tokens_in_text=True).render(messages).count(end) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_sampled_control_tokens_are_not_shown(renderer: Renderer, *, stream: bool) -> None:
    (start,) = renderer.encode("<|im_start|>")
    ids = [*renderer.encode("2 +"), start, *renderer.encode(" 3 <think"), start, start]
    ids += [*renderer.encode("> é"), renderer.stop_token_ids[0], start]
    prompt = renderer.render([{"role": "user", "content": "Write."}])
    parser = StreamingParser(renderer, None, prompt)
    parts = [parser.feed([token]) for token in ids]
    message, last = parser.finish(ids)
    assert message == renderer.parse(ids, prompt_ids=prompt)
    content = "".join(part.content for part in (*parts, last)) if stream else message.content
    assert content == "2 + 3 <think> é"
    assert renderer.parse(ids, verbatim=True).content == content


def test_sampled_markers_of_calls_are_still_read(real_tokenizer: Callable[[str], Path]) -> None:
    renderer = Renderer.load(real_tokenizer("mistral_nemo"))
    call = '[TOOL_CALLS][{"name": "calc", "arguments": {"sum": "1"}}]'
    ids = [*renderer.encode("[INST]"), *renderer.encode(call), renderer.stop_token_ids[0]]
    (parsed,) = renderer.parse(ids, TOOLS).tool_calls
    assert parsed.name == "calc"
    assert renderer.parse(ids, TOOLS).content == ""
