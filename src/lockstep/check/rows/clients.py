"""Requests of stock clients: stop strings, grammars, penalties, error wordings, odd turns."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from lockstep.check.outcome import NotApplicable, require
from lockstep.check.row import RowGroup
from lockstep.check.rows.experts import COUNTS
from lockstep.check.rows.text import renderer_of, there
from lockstep.check.target import Target
from lockstep.tokens.grammar import Grammar

GROUP = RowGroup("clients")
CHAT = "/v1/chat/completions"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
REQUEST = [{"role": "user", "content": "Count from one to twenty."}]


@GROUP.row("stop", "a stop string ends the text, and no id or logprob is lost", "F66")
async def stop(target: Target) -> str:
    renderer = renderer_of(target)
    prompt = renderer.encode("one two three four five")
    whole = await target.one(prompt, max_tokens=24)
    text = renderer.decode(whole.token_ids)
    middle = text[len(text) // 2 :]
    wanted = next((middle[at : at + 2] for at in range(len(middle) - 1) if "\ufffd" not in
                   middle[at : at + 2]), None)  # fmt: skip
    if wanted is None:
        raise NotApplicable("nothing was sampled that could be a stop string")
    ended = await target.one(prompt, max_tokens=24, stop=(wanted,))
    count = len(ended.token_ids)
    evidence = f"stop {wanted!r}: {count} of {len(whole.token_ids)} tokens, finish {ended.finish!r}"
    require(ended.finish == "stop" and ended.stop_reason == wanted, evidence)
    require(ended.token_ids == whole.token_ids[:count], f"{evidence}; they are other tokens")
    included = wanted in renderer.decode(ended.token_ids)
    require(included, f"{evidence}; the tokens of the string are cut off")
    return f"{evidence}, with the tokens of the string"


@GROUP.row("structured", "a grammar constrains the sampled tokens", "F67")
async def structured(target: Target) -> str:
    renderer = renderer_of(target)
    choices = ["alpha", "beta"]
    grammar = Grammar("choice", json.dumps(choices))
    completion = await target.one(
        target.prompt(), grammar=grammar, ignore_eos=False, temperature=1.0
    )
    ends = set(renderer.stop_token_ids)
    text = renderer.decode(token for token in completion.token_ids if token not in ends)
    evidence = f"one of {choices}: {text!r}"
    require(text in choices, evidence)
    return evidence


@GROUP.row("penalties", "penalties change the sampled tokens", "L0")
async def penalties(target: Target) -> str:
    token = target.prompt()[0]
    # The bias is so strong that only a repetition penalty can bring in another token.
    forced: dict[str, Any] = {"allowed_token_ids": (token, token + 1), "max_tokens": 12}
    plain = await target.one(target.prompt(), **forced)
    held = await target.one(target.prompt(), **forced, frequency_penalty=2.0, presence_penalty=2.0)
    before, after = (_most(completion.token_ids) for completion in (plain, held))
    evidence = f"the most frequent of 12 tokens came {before} times, with penalties {after}"
    if before < 12:
        raise NotApplicable(f"{evidence}: nothing was repeated throughout")
    require(after < before, f"{evidence}; they had no effect")
    return evidence


@GROUP.row("overlong", "an overlong prompt is an error with the wording that clients match", "F52")
async def overlong(target: Target) -> str:
    length = target.card.max_model_len
    if length is None:
        raise NotApplicable("/v1/models tells no max_model_len: it is not known what is too long")
    reply = await target.send_ids([target.prompt()[0]] * length)
    fields = reply.fields.get("error")
    error = fields if isinstance(fields, dict) else reply.fields
    code, message = error.get("code"), str(error.get("message", ""))
    evidence = f"{reply.describe()}, code {code!r}"
    require(reply.status == 400, f"expected 400: {evidence}")
    recognisable = code == "context_length_exceeded" or "maximum context length" in message.lower()
    require(recognisable, f"{evidence}; no client takes that for a prompt that is too long")
    return evidence


@GROUP.row(
    "temperature", "turns at two temperatures are recorded apart, also in one session", "F53"
)
async def temperature(target: Target) -> str:
    pair = [await target.one(target.prompt(), temperature=value) for value in (1.0, 0.5)]
    temperatures = [turn.temperature for turn in pair]
    require(temperatures == [1.0, 0.5], f"sampled at 1.0 and 0.5, recorded as {temperatures}")
    samples = await _session_samples(target)
    if samples is None:
        return f"completions say {temperatures}; sessions cannot be read here (--admin)"
    mixed = sorted(sample["temperature"] for sample in samples)
    require(mixed == [0.5, 1.0], f"a session with both: samples at {mixed}")
    return f"completions say {temperatures}; a session with both has a sample for each"


async def _session_samples(target: Target) -> list[dict[str, Any]] | None:
    """Return the samples of a session with one turn per temperature; None without sessions."""
    options, name = target.options, f"check-{uuid4().hex}"
    if options.admin is None or options.token is None:
        return None
    base, chat = target.transport.base_url, list(REQUEST)
    for value in (1.0, 0.5):
        body = {"model": target.card.id, "messages": chat, "max_tokens": 4, "temperature": value}
        reply = await target.raw.send("POST", f"{base}/sessions/{name}{CHAT}", body)
        if reply.missing:
            return None
        require(reply.status == 200, f"a turn at {value}: {reply.describe()}")
        chat += [reply.fields["choices"][0]["message"], REQUEST[0]]
    url = f"{options.admin.rstrip('/')}/v1/rl/sessions/{name}"
    read = await target.raw.send("GET", url, token=options.token)
    if read.missing:
        return None
    require(read.status == 200, f"a session with turns at 1.0 and 0.5: {read.describe()}")
    samples = read.fields.get("samples")
    return samples if isinstance(samples, list) else []


@GROUP.row("tools", "a malformed tool call stays in the content, and is reported", "F54")
async def tools(target: Target) -> str:
    renderer = renderer_of(target)
    opening = renderer.encode("<tool_call>")
    if len(opening) != 1:
        raise NotApplicable("the model's tool calls do not open with one token <tool_call>")
    body = {
        "model": target.card.id, "messages": REQUEST, "tools": [TOOL], "max_tokens": 3,
        "allowed_token_ids": opening, "ignore_eos": True,
    }  # fmt: skip
    reply = there(await target.post(CHAT, body), CHAT)
    if reply.refused:
        raise NotApplicable(f"tools cannot be called here: {reply.describe()}")
    choice = reply.fields["choices"][0]
    message, problem = choice["message"], choice.get("tool_parse_error")
    evidence = f"content {message.get('content')!r}, tool_parse_error {problem!r}"
    require(not message.get("tool_calls"), f"{evidence}; and it is a call")
    require(message.get("content") == "<tool_call>" * 3, f"{evidence}; it is not what was sampled")
    require(bool(problem), f"{evidence}; no error is reported")
    return evidence


@GROUP.row("experts", "a start of routed experts alone does not request them", "L0 F38")
async def experts(target: Target) -> str:
    if target.dialect.route != "/inference/v1/generate":
        raise NotApplicable("this dialect has no such field")
    body = target.dialect.body(target.card.id, target.prompt())
    body["sampling_params"] |= {"routed_experts_prompt_start": 4}
    reply = await target.post(target.dialect.route, body)
    evidence = f"routed_experts_prompt_start 4: {reply.describe()}"
    require(reply.status == 200, evidence)
    came = reply.fields["choices"][0].get("routed_experts") is not None
    if not any(target.config.get(name) for name in COUNTS):
        require(not came, f"{evidence}, with experts of a model that has none")
    return f"{evidence}, {'with' if came else 'without'} experts"


def _most(ids: list[int]) -> int:
    return max(ids.count(token) for token in set(ids))
