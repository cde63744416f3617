"""Choosing a family by what it writes, parsing completions, and staying off the event loop."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from lockstep.models import bundled
from lockstep.render import CallStatus, Renderer
from lockstep.render.bridge import DUMMY, FamilyBridge
from lockstep.tokens.errors import BadRequest, UnknownModel
from tests import tokenizers
from tests.ledger.rollouts import TOOLS

QUESTION = [{"role": "user", "content": "1 + 2?"}]


def parse(renderer: Renderer, text: str, tools: Any = TOOLS) -> Any:
    return renderer.parse(renderer.encode(text), tools, prompt_ids=renderer.render(QUESTION, tools))


@pytest.mark.parametrize(
    ("name", "family", "bridge"),
    [
        ("tiny", "qwen3", "family"),
        ("qwen3", "qwen3", "family"),
        ("llama3_2", "llama-3", "family"),
        ("deepseek_v3", None, "template"),
        ("gemma3", None, "template"),
        ("mistral_nemo", None, "template"),
    ],
)
def test_a_family_is_found_by_what_it_writes(
    name: str, family: str | None, bridge: str, real_tokenizer: Callable[[str], Path]
) -> None:
    renderer = Renderer.load(name if name == "tiny" else real_tokenizer(name))
    assert (renderer.family, renderer.bridge) == (family, bridge)


def look_alike() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(bundled("tiny"))
    tokenizer.chat_template = tokenizer.chat_template.replace("# Tools", "# My tools")
    return Renderer(tokenizer, model_type="qwen3")


def test_a_look_alike_with_another_template_is_no_family() -> None:
    renderer = look_alike()
    assert renderer.family is None
    assert renderer.bridge == "template"


def test_a_template_that_closes_with_bare_text_has_no_bridge() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled("tiny"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert Renderer(tokenizer).bridge is None


def test_a_template_that_moves_messages_to_the_front_has_no_bridge_for_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled("tiny"))
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tokenizer)
    parsed = [*renderer.encode("Yes."), renderer.stop_token_ids[0]]
    new = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert renderer.bridge == "template"
    assert renderer.extend(renderer.render(QUESTION), parsed, QUESTION, None) is not None
    assert renderer.extend(renderer.render(QUESTION), parsed, new, None) is None


def test_renderers_are_made_once_per_model_and_setting() -> None:
    assert Renderer.load("tiny") is Renderer.load("tiny")
    assert Renderer.load("tiny") is Renderer.load(bundled("tiny") or "")
    assert Renderer.load("tiny") is not Renderer.load("tiny", thinking="template")


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=str(tmp_path)):
        Renderer.load(tmp_path)
    with pytest.raises(BadRequest, match="family is 'qwen9'"):
        Renderer.load("tiny", family="qwen9")
    with pytest.raises(BadRequest, match="thinking is 'all'"):
        Renderer.load("tiny", thinking="all")  # type: ignore[arg-type]


def test_template_variables_reach_the_template() -> None:
    off = Renderer.load("tiny", template_kwargs={"enable_thinking": False})
    assert off.decode(off.render(QUESTION)).endswith("<think>\n\n</think>\n\n")


def test_a_refusing_template_is_a_bad_request(real_tokenizer: Callable[[str], Path]) -> None:
    renderer = Renderer.load(real_tokenizer("gemma3"))
    with pytest.raises(BadRequest, match="must alternate"):
        renderer.render([*QUESTION, *QUESTION])


@pytest.mark.failure_mode("F19")
@pytest.mark.parametrize(
    ("text", "status", "finish"),
    [
        ('<tool_call>\n{"name": "calc", "arguments": {"sum": "1"}}\n</tool_call>',
         CallStatus.OK, "tool_calls"),
        ('<tool_call>\n{"name": "calc", "arguments": {"sum": \n</tool_call>',
         CallStatus.INVALID_JSON, "stop"),
        ('<tool_call>\n{"name": "calc", "arguments": {"sum": "1"}}',
         CallStatus.UNCLOSED_BLOCK, "stop"),
        ('<tool_call>\n{"arguments": {"sum": "1"}}\n</tool_call>', CallStatus.MISSING_NAME, "stop"),
        ('<tool_call>\n{"name": "calc", "arguments": [1]}\n</tool_call>',
         CallStatus.MALFORMED_STRUCTURE, "stop"),
        ('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
         CallStatus.UNKNOWN_TOOL, "stop"),
    ],
)  # fmt: skip
def test_finish_is_tool_calls_only_when_a_call_really_parsed(
    renderer: Renderer, text: str, status: CallStatus, finish: str
) -> None:
    parsed = parse(renderer, f"{text}<|im_end|>")
    assert [call.status for call in parsed.calls] == [status]
    assert parsed.finish("stop") == finish
    assert parsed.finish("length") == "length"
    assert parsed.finish("abort") == "abort"


@pytest.mark.failure_mode("F19")
def test_a_good_call_beside_a_bad_one_is_still_a_call(renderer: Renderer) -> None:
    good = '<tool_call>\n{"name": "calc", "arguments": {"sum": "1"}}\n</tool_call>'
    parsed = parse(
        renderer, f"<think>\nHm.\n</think>\n\nSee:\n{good}\n<tool_call>\n{{\n</tool_call>"
    )
    assert [call.status for call in parsed.calls] == [CallStatus.OK, CallStatus.INVALID_JSON]
    assert parsed.finish("stop") == "tool_calls"
    message = parsed.message()
    assert message["content"] == "See:\n\n<tool_call>\n{\n</tool_call>"
    assert parsed.tool_parse_error == "invalid_json: the arguments of the call are no JSON"
    assert message["reasoning_content"] == "Hm."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["calc"]


@pytest.mark.parametrize("arguments", ["1" * 5000, "[" * 5000])
def test_json_that_no_reader_takes_is_a_failed_call(renderer: Renderer, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "calc", "arguments": {arguments}}}\n</tool_call>'
    parsed = parse(renderer, f"{text}<|im_end|>")
    assert [call.status for call in parsed.calls] == [CallStatus.INVALID_JSON]
    assert parsed.finish("stop") == "stop"
    assert arguments in parsed.message()["content"]


def test_half_a_surrogate_pair_is_a_bad_request(renderer: Renderer) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        renderer.render([{"role": "user", "content": "\ud83d"}])


def test_a_failed_call_stays_readable(renderer: Renderer) -> None:
    message = parse(renderer, "<tool_call>\nnot json\n</tool_call>").message()
    content = "<tool_call>\nnot json\n</tool_call>"
    assert message == {"role": "assistant", "content": content}


def test_a_call_keeps_its_id_while_it_streams(renderer: Renderer) -> None:
    text = '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>'
    (whole,) = parse(renderer, f"{text}<|im_end|>").calls
    (part,) = parse(renderer, text).calls
    assert whole.id == part.id
    assert whole.id.startswith("call_")


def test_reasoning_cut_short_is_said(renderer: Renderer) -> None:
    parsed = parse(renderer, "<think>\nI was just")
    assert parsed.reasoning == "I was just"
    assert parsed.reasoning_complete is False


def test_a_tokenizer_of_ones_own_needs_no_chat_template(renderer: Renderer) -> None:
    own = renderer.tokenizer
    bare = SimpleNamespace(
        name_or_path="mine",
        unk_token_id=None,
        eos_token_id=own.eos_token_id,
        encode=own.encode,
        decode=own.decode,
        convert_tokens_to_ids=own.convert_tokens_to_ids,
        convert_ids_to_tokens=own.convert_ids_to_tokens,
    )
    mine = Renderer(bare, family="qwen3")
    assert mine.render(QUESTION, TOOLS) == renderer.render(QUESTION, TOOLS)
    assert mine.bridge == "family"
    with pytest.raises(BadRequest, match=r"no chat template.*put the template"):
        Renderer(bare).render(QUESTION)


@pytest.mark.parametrize("name", ["llama2", "gemma2", "yi", "gpt2"])
def test_a_tokenizer_without_a_template_reads_text_and_says_what_messages_need(
    name: str, real_tokenizer: Callable[[str], Path]
) -> None:
    renderer = Renderer.load(real_tokenizer(name))
    assert renderer.decode(renderer.encode("two words")).strip() == "two words"
    with pytest.raises(BadRequest, match=r"chat_template\.jinja.*/v1/completions"):
        renderer.render(QUESTION)


@pytest.mark.parametrize("name", ["internlm2", "chatglm3"])
def test_a_tokenizer_that_asks_for_its_own_code_says_what_to_change(
    name: str, tmp_path: Path, real_tokenizer: Callable[[str], Path]
) -> None:
    place = real_tokenizer(name)
    with pytest.raises(BadRequest, match="take auto_map out"):
        Renderer.load(place)
    changed = Renderer.load(tokenizers.without_own_code(place, tmp_path / name))
    assert "1 + 2?" in changed.decode(changed.render(QUESTION))


@pytest.mark.parametrize("name", ["llama3", "gpt4", "gemini"])
def test_the_token_that_closes_a_turn_is_no_part_of_its_text(
    name: str, real_tokenizer: Callable[[str], Path]
) -> None:
    renderer = Renderer.load(real_tokenizer(name))
    close = renderer.stop_token_ids[-1]
    assert close != renderer.tokenizer.eos_token_id
    for after in ([], renderer.encode("more")):
        parsed = renderer.parse([*renderer.encode("It matters."), close, *after])
        assert parsed.message()["content"] == "It matters."


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_writes_system_and_tools_with_the_newest_message_is_bridged(
    system: list[Any], tools: Any, real_tokenizer: Callable[[str], Path]
) -> None:
    renderer = Renderer.load(real_tokenizer("mistral_nemo"))
    prompt = renderer.render([*system, *QUESTION], tools)
    answer = [*renderer.encode("Three."), *renderer.stop_token_ids]
    new = [{"role": "user", "content": "And 3 + 4?"}]
    extension = renderer.extend(prompt, answer, new, tools, system=system)
    whole = renderer.render(
        [*system, *QUESTION, {"role": "assistant", "content": "Three."}, *new], tools
    )
    assert extension is not None
    assert whole[-len(extension) :] == extension
    assert [each["content"] in renderer.decode(extension) for each in system] == [True] * len(
        system
    )
    assert ("AVAILABLE_TOOLS" in renderer.decode(extension)) == bool(tools)


def test_a_system_message_that_could_be_taken_for_the_dummy_reply_is_not_bridged(
    real_tokenizer: Callable[[str], Path],
) -> None:
    renderer = Renderer.load(real_tokenizer("mistral_nemo"))
    system = [{"role": "system", "content": f"Say {DUMMY}."}]
    answer = [*renderer.encode("Three."), *renderer.stop_token_ids]
    prompt = renderer.render([*system, *QUESTION])
    assert renderer.extend(prompt, answer, QUESTION, None, system=system) is None
    assert renderer.extend(prompt, answer, QUESTION, None) is not None


def test_ids_of_calls_are_made_to_fit_a_template_that_takes_short_ones_only(
    real_tokenizer: Callable[[str], Path],
) -> None:
    renderer = Renderer.load(real_tokenizer("mistral_nemo"))

    def rendered(call_id: str) -> str:
        call = {"id": call_id, "function": {"name": "calc", "arguments": {"sum": "1"}}}
        return renderer.decode(
            renderer.render(
                [
                    *QUESTION,
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": call_id, "content": "3"},
                ],
                TOOLS,
            )
        )

    assert rendered("abcde1234").count("abcde1234") == 2
    (made,) = set(re.findall(r'(?:"id"|"call_id"): "(.*?)"', rendered("call_" + "0" * 24)))
    assert re.fullmatch(r"[a-z0-9]{9}", made)


async def test_rendering_leaves_the_event_loop_free(renderer: Renderer) -> None:
    long = [{"role": "user", "content": "word " * 120_000}]
    longest_gap, running = 0.0, True

    async def heartbeat() -> None:
        nonlocal longest_gap
        last = time.perf_counter()
        while running:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest_gap, last = max(longest_gap, now - last), now

    beating = asyncio.create_task(heartbeat())
    await asyncio.sleep(0)
    started = time.perf_counter()
    ids = await renderer.render_async(long)
    took = time.perf_counter() - started
    running = False
    await beating
    assert len(ids) > 120_000
    assert longest_gap < 0.5 * took


@pytest.mark.parametrize("name", ["tiny", "template"])
def test_space_around_a_message_is_no_part_of_it(name: str) -> None:
    renderer = Renderer.load("tiny") if name == "tiny" else look_alike()
    parsed = parse(renderer, "<think>\n\n Hm. \n</think>\n\n  503 \n<|im_end|>")
    assert (parsed.content, parsed.reasoning) == ("503", "Hm.")
    verbatim = renderer.parse(renderer.encode("  503 \n<|im_end|>"), verbatim=True)
    assert verbatim.content == "  503 \n"


def test_a_family_that_bridges_otherwise_than_the_template_is_not_used(renderer: Renderer) -> None:
    class Bridging:
        """A family whose bridge appends one id, or has no way on."""

        def __init__(self, *extension: int) -> None:
            self.extension = extension

        def bridge_to_next_turn(
            self, prompt: list[int], completion: list[int], messages: Any, tools: Any
        ) -> Any:
            ids = [*prompt, *completion, *self.extension]
            return SimpleNamespace(token_ids=ids) if self.extension else None

    close = renderer.stop_token_ids[0]
    assert not FamilyBridge(Bridging(1)).agrees_with(renderer.template, close)
    assert FamilyBridge(Bridging()).agrees_with(renderer.template, close)


def test_threads_may_share_a_renderer(renderer: Renderer) -> None:
    expected = renderer.render(QUESTION, TOOLS)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(100):
            if renderer.render(QUESTION, TOOLS) != expected:
                wrong.append("render")
            renderer.parse(renderer.encode("Hello.<|im_end|>"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
