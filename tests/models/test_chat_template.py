"""The bundled chat template writes exactly the tokens of the Qwen3 renderer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from lockstep.models import BUNDLED, bundled
from rollout import write_out
from tasks import TASKS
from tests.models.conversations import conversation

renderers = pytest.importorskip("renderers")

CONVERSATIONS = 300


@pytest.fixture(scope="module", params=BUNDLED)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return AutoTokenizer.from_pretrained(bundled(request.param))


def renderer_of(tokenizer: Any, **config: Any) -> Any:
    return renderers.create_renderer(tokenizer, renderers.Qwen3RendererConfig(**config))


@pytest.mark.parametrize("thinking", [True, False])
def test_template_equals_renderer_on_random_conversations(tokenizer: Any, thinking: bool) -> None:
    renderer = renderer_of(tokenizer, enable_thinking=thinking)
    rng = random.Random(7)
    for _ in range(CONVERSATIONS):
        messages, tools = conversation(rng)
        opens_turn = rng.random() < 0.5
        from_template = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=opens_turn,
            enable_thinking=thinking,
            tokenize=True,
            return_dict=False,
        )
        from_renderer = renderer.render_ids(messages, tools=tools, add_generation_prompt=opens_turn)
        assert from_template == from_renderer, messages


def test_thinking_is_on_when_the_template_is_not_told(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    unsaid = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert unsaid.endswith("<|im_start|>assistant\n")


def test_reasoning_before_the_last_question_is_dropped(tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    question = {"role": "user", "content": "What is 2 + 2?"}
    text = tokenizer.apply_chat_template([question, answer, question, answer], tokenize=False)
    assert text.count("two and two") == 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("task", list(TASKS))
def test_training_text_has_the_tokens_of_a_rollout(
    tokenizer: Any, task: str, thinking: bool
) -> None:
    """Replay each training conversation as a rollout would run it, turn by turn."""
    renderer = renderer_of(tokenizer, enable_thinking=thinking)
    for seed in range(20):
        episode = TASKS[task](random.Random(seed))
        written = write_out(tokenizer, episode, episode.right, thinking=thinking)

        episode = TASKS[task](random.Random(seed))
        messages = list(episode.opening)
        ids = renderer.render_ids(messages, tools=episode.tools, add_generation_prompt=True)
        sampled = [False] * len(ids)
        while True:
            words = episode.right()
            completion = tokenizer.encode(words + "<|im_end|>", add_special_tokens=False)
            parsed = renderer.parse_response(completion, prompt_ids=ids)
            messages.append(assistant_message(parsed))
            reply = episode.reply(words)
            if reply is None:
                ids, sampled = ids + completion, sampled + [True] * len(completion)
                break
            messages.append(reply)
            bridged = renderer.bridge_to_next_turn(ids, completion, [reply], tools=episode.tools)
            # With thinking on, the renderer declines to bridge over a new user question.
            extended = (
                bridged.token_ids
                if bridged is not None
                else renderer.render_ids(messages, tools=episode.tools, add_generation_prompt=True)
            )
            assert extended[: len(ids) + len(completion)] == ids + completion
            sampled += [True] * len(completion)
            sampled += [False] * (len(extended) - len(sampled))
            ids = extended
        assert written.ids == ids
        assert written.sampled == sampled


def assistant_message(parsed: Any) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in parsed.tool_calls or []]
    return {"role": "assistant", "content": parsed.content or "", "tool_calls": calls}
