"""Samples as the report shows them: every token with its author, logprobs and version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.train.learning.batch import TrainBatch

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
TOOL_OPEN, TOOL_CLOSE = "<tool_response>", "</tool_response>"
ROLES = ("system", "user", "assistant", "tool")


def transcripts(
    step: int,
    env: str,
    batch: TrainBatch,
    logprobs: Sequence[list[float]],
    tokenizer: Any,
    count: int,
) -> list[dict[str, Any]]:
    """Up to `count` samples of a step, the best and the worst first."""
    by_reward = sorted(range(len(batch.items)), key=lambda at: batch.items[at].reward)
    ends = [at for pair in zip(reversed(by_reward), by_reward, strict=True) for at in pair]
    lines = []
    for at in list(dict.fromkeys(ends))[:count]:
        item = batch.items[at]
        sample = item.sample
        strings = [tokenizer.decode([token]) for token in sample.token_ids]
        versions: list[str | None] = [None] * len(strings)
        for span in sample.versions:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        lines.append(
            {
                "step": step,
                "env": env,
                "reward": item.reward,
                "advantage": item.advantage,
                "token_ids": sample.token_ids,
                "token_strings": strings,
                "sampled_mask": sample.sampled_mask,
                "logprobs": sample.logprobs,
                "trainer_logprobs": logprobs[at],
                "versions": versions,
                "roles": roles(strings, sample.sampled_mask),
                "workers": list(sample.workers),
            }
        )
    return lines


def roles(strings: Sequence[str], sampled: Sequence[bool]) -> list[str]:
    """Who wrote each token: system, user, assistant or tool; or the template, which frames them.

    Sampled tokens are the assistant's whatever the format. The rest is read from ChatML markers;
    in other formats it is the template's.
    """
    written: list[str] = []
    role, naming, name = "template", False, ""
    for text, was_sampled in zip(strings, sampled, strict=True):
        if was_sampled:
            written.append("assistant")
            role = "template" if text == CLOSE else role
            continue
        if text == OPEN:
            role, naming, name = "template", True, ""
            written.append("template")
        elif naming:
            # The role's name runs to the end of its line, perhaps over several tokens.
            written.append("template")
            name, naming = name + text, "\n" not in text
            role = name.strip() if name.strip() in ROLES else "template"
        elif text == CLOSE:
            written.append("template")
            role = "template"
        elif text in (TOOL_OPEN, TOOL_CLOSE):
            written.append("template")
            role = "tool" if text == TOOL_OPEN else "user"
        else:
            written.append(role)
    return written
