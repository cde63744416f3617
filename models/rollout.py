"""Token sequences of episodes: written out for training, or sampled from a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tasks import TASKS, Episode, Message

MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Transcript:
    """The tokens of a conversation; `sampled` marks those that the assistant says."""

    ids: list[int]
    sampled: list[bool]


def write_out(
    tokenizer: Any, episode: Episode, speak: Callable[[], str], *, thinking: bool = True
) -> Transcript:
    """Play the episode with `speak` and return the tokens a rollout of it would have.

    A rollout keeps the tokens of earlier turns and appends to them, so this is not the chat
    template applied to the finished conversation: that would open the last answer with a think
    block which no generation prompt of the default (thinking on) ever contains.
    """
    ids: list[int] = []
    sampled: list[bool] = []
    prompt = opening_text(tokenizer, episode, thinking=thinking)
    while True:
        spoken = speak()
        for text, is_sampled in ((prompt, False), (spoken + tokenizer.eos_token, True)):
            tokens = encode(tokenizer, text)
            ids += tokens
            sampled += [is_sampled] * len(tokens)
        reply = episode.reply(spoken)
        if reply is None:
            return Transcript(ids, sampled)
        prompt = next_turn_text(reply, thinking=thinking)


def opening_text(tokenizer: Any, episode: Episode, *, thinking: bool = True) -> str:
    """Return the first prompt of an episode."""
    text = tokenizer.apply_chat_template(
        episode.opening,
        tools=episode.tools,
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=thinking,
    )
    return str(text)


def next_turn_text(reply: Message, *, thinking: bool = True) -> str:
    """Return what follows the assistant's end token: the reply and the next generation prompt."""
    body = reply["content"]
    if reply["role"] == "tool":
        body = f"<tool_response>\n{body}\n</tool_response>"
    no_thinking = "" if thinking else "<think>\n\n</think>\n\n"
    return f"\n<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n{no_thinking}"


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of `text`, added tokens recognised, nothing added."""
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def play(
    model: Any, tokenizer: Any, episodes: Sequence[Episode], *, greedy: bool = False
) -> list[list[str]]:
    """Let the model speak in all episodes at once; return what it said in each, turn by turn.

    Samples at temperature 1 from the whole vocabulary, with torch's global random state.
    """
    turns: list[list[str]] = [[] for _ in episodes]
    ids = [encode(tokenizer, opening_text(tokenizer, episode)) for episode in episodes]
    active = list(range(len(episodes)))
    while active:
        completions = _generate(model, tokenizer, [ids[i] for i in active], greedy)
        still: list[int] = []
        for i, completion in zip(active, completions, strict=True):
            text = tokenizer.decode([t for t in completion if t != tokenizer.eos_token_id])
            turns[i].append(text)
            ended = completion[-1] == tokenizer.eos_token_id
            reply = episodes[i].reply(text) if ended else None
            if reply is not None:
                ids[i] += completion + encode(tokenizer, next_turn_text(reply))
                still.append(i)
        active = still
    return turns


def _generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], greedy: bool
) -> list[list[int]]:
    """Complete the prompts; each completion is cut after its end token."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    width = batch["input_ids"].shape[1]
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    rows = model.generate(**batch, **how, max_new_tokens=MAX_NEW_TOKENS)[:, width:].tolist()
    end = tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def accuracy(
    model: Any, tokenizer: Any, *, count: int, seed: int, greedy: bool = False
) -> dict[str, float]:
    """Return the mean score of each task over `count` fresh episodes."""
    torch.manual_seed(seed)
    model.eval()
    means: dict[str, float] = {}
    for name, make in TASKS.items():
        rng = random.Random(f"{name} {seed}")
        episodes = [make(rng) for _ in range(count)]
        play(model, tokenizer, episodes, greedy=greedy)
        means[name] = sum(episode.score for episode in episodes) / count
    return means
