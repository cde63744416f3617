"""A body that is too much, too deep or not what it says is refused by name, and never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.abuse.target import POSTS, Listener, Target

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
DIGITS = "9" * 5000
DEEP = b"[" * 30_000 + b"]" * 30_000
SAYING = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [SAYING], "max_tokens": 1, **fields}).encode()


def generate(**sampling: Any) -> bytes:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, **sampling}}
    return json.dumps(body).encode()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


# Every listener


@pytest.mark.parametrize("kind", [
    "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/jsonx", "text/plain; application/json",
])  # fmt: skip
def test_a_body_needs_a_json_content_type(listener: Listener, kind: str) -> None:
    lines = [f"content-type: {kind}"] * bool(kind) + [f"content-length: {len(listener.body)}"]
    status, answer = listener.answer(listener.head(*lines) + listener.body)
    assert status == 400
    assert answer["error"]["param"] == "content-type"


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_a_content_type_may_have_parameters(listener: Listener, kind: str) -> None:
    lines = (f"content-type: {kind}", f"content-length: {len(listener.body)}")
    assert listener.status(listener.head(*lines) + listener.body) == 200


@pytest.mark.parametrize("line", ["origin: https://evil.example", "sec-fetch-site: cross-site"])
def test_a_page_of_another_site_may_not_call(listener: Listener, line: str) -> None:
    assert listener.status(listener.post(None, line)) == 403


@pytest.mark.parametrize("depth", [90, 900, 30_000])
def test_deep_json_is_no_crash(listener: Listener, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for body in (deep, b'{"a":' + deep + b"}"):
        assert listener.status(listener.post(body)) == 400
    field = next(iter(json.loads(POSTS[listener.name][1]) or {"x": 1}))
    assert listener.status(listener.post(b'{"%b":%b}' % (field.encode(), deep))) == 400


def test_what_an_error_quotes_is_short(listener: Listener) -> None:
    name = "n" * 1_000_000
    status, answer = listener.answer(listener.post(json.dumps({name: 1}).encode()))
    assert status == 400
    assert len(json.dumps(answer)) < 10_000


def test_escapes_from_a_path_or_a_header_do_not_reach_the_log(
    target: Target, listener: Listener
) -> None:
    for path in ("/%1b%5b2Jred", "/engine/%1b%5b2Jred", "/sessions/%1b%5b2J/v1/models"):
        listener.status(listener.head(path=path, method="GET"))
        listener.status(listener.post(None, "x-request-id: \x9b2J", path=path))
    assert "\x1b" not in target.log()
    assert "\x9b" not in target.log()


# The data ports


@pytest.mark.parametrize("name", ["gateway", "worker"])
@pytest.mark.parametrize("given", ["x" * 300, "x" * 60_000, "a b", "\x9b2J"])
def test_an_id_of_a_request_is_short_and_printable(target: Target, name: str, given: str) -> None:
    listener = target.listeners[name]
    line = f"x-request-id: {given}"
    sent = listener.post(generate(), path=GENERATE)
    head, _, body = sent.partition(b"\r\n\r\n")
    status, answer = listener.answer(head + b"\r\n" + line.encode("latin-1") + b"\r\n\r\n" + body)
    assert status in (400, 431)
    if status == 400:
        assert answer["error"]["param"] == "x-request-id"
        assert len(json.dumps(answer)) < 2000


@pytest.mark.parametrize("name", ["gateway", "worker"])
@pytest.mark.parametrize(("body", "param"), [
    (b'{"token_ids":[%b],"sampling_params":{}}' % DIGITS.encode(), "token_ids"),
    (b'{"token_ids":[1],"sampling_params":{"stop_token_ids":[%b]}}' % DIGITS.encode(), "stop"),
    (b'{"token_ids":[1],"sampling_params":{"max_tokens":%b}}' % DIGITS.encode(), "max_tokens"),
    (b'{"token_ids":[1],"sampling_params":{"temperature":%b}}' % DIGITS.encode(), "temperature"),
    (generate(logit_bias={DIGITS: 1}), "logit_bias"),
    (generate(stop_token_ids=list(range(5000))), "stop_token_ids"),
    (generate(logit_bias={str(at): 1 for at in range(20_000)}), "logit_bias"),
    (b'{"token_ids":' + DEEP + b',"sampling_params":{}}', ""),
])  # fmt: skip
def test_numbers_and_lists_of_generate_have_a_size(
    target: Target, name: str, body: bytes, param: str
) -> None:
    listener = target.listeners[name]
    status, answer = listener.answer(listener.post(body, path=GENERATE))
    assert status == 400
    assert param in (answer["error"]["param"] or "")


@pytest.mark.parametrize(("path", "body", "param"), [
    (CHAT, chat(logit_bias={DIGITS: 1}), "logit_bias"),
    (CHAT, chat(messages=[SAYING] * 10_001), "messages"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}] * 1025), "tools"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": nested(60)}}]),
     "tools"),
    (CHAT, chat(messages=[{**SAYING, "extra": nested(60)}]), "messages"),
    (CHAT, chat(chat_template_kwargs=nested(60)), "chat_template_kwargs"),
    (CHAT, chat(messages=[{"role": "user", "content": "many words " * 20_000}]), "messages"),
    ("/sessions/s/v1/chat/completions", chat(messages=[SAYING] * 10_001), "messages"),
    ("/v1/completions", json.dumps({"prompt": ["a"] * 5000}).encode(), "prompt"),
    ("/v1/completions", json.dumps({"prompt": "many words " * 20_000}).encode(), "prompt"),
    ("/v1/completions", b'{"prompt":[%b]}' % DIGITS[:4000].encode(), "prompt"),
    ("/detokenize", b'{"tokens":[%b]}' % DIGITS.encode(), "tokens"),
    ("/tokenize", json.dumps({"messages": [SAYING] * 10_001}).encode(), "messages"),
    ("/inference/v1/abort_requests", json.dumps({"request_ids": ["x"] * 20_001}).encode(),
     "request_ids"),
])  # fmt: skip
def test_what_a_gateway_is_sent_has_a_size(
    target: Target, path: str, body: bytes, param: str
) -> None:
    gateway = target.listeners["gateway"]
    status, answer = gateway.answer(gateway.post(body, path=path))
    assert status == 400
    assert param in answer["error"]["param"]


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, chat(metadata={"a": [[]] * 70_000})),
    (CHAT, b'{"messages":[' + b"{}," * 70_000 + b"{}]}"),
    (CHAT, b'{"metadata":{"a":[' + b"0," * 2_100_000 + b"0]}}"),
    ("/tokenize", json.dumps({"prompt": "x" * 1_000_001}).encode()),
    ("/tokenize", b'"' + b"x" * (17 << 20) + b'"'),
])  # fmt: skip
def test_what_holds_too_much_is_refused_before_it_is_decoded(
    target: Target, path: str, body: bytes
) -> None:
    gateway = target.listeners["gateway"]
    assert gateway.status(gateway.post(body, path=path)) == 413


def test_text_that_quotes_much_json_is_no_body_with_many_values(target: Target) -> None:
    text = json.dumps([{"a": {"b": ["c"]}}] * 20_000)
    gateway = target.listeners["gateway"]
    status, answer = gateway.answer(
        gateway.post(json.dumps({"prompt": text}).encode(), path="/tokenize")
    )
    assert status == 200
    assert answer["count"] > 20_000


# The admin port


@pytest.mark.parametrize(("path", "method", "body"), [
    (f"/v1/rl/sessions?limit={DIGITS}", "GET", b""),
    (f"/v1/rl/pause?lease_seconds={DIGITS}", "POST", b"{}"),
    ("/v1/rl/workers", "POST", b'{"url":"http://127.0.0.1:99999"}'),
    ("/v1/rl/workers", "POST", b'{"url":"http://127.0.0.1:x","admin_url":"http://127.0.0.1:y"}'),
    ("/v1/rl/workers", "POST", b'{"url":"http://127.0.0.1:%b"}' % DIGITS.encode()),
    ("/v1/rl/init_broadcaster", "POST", b'{"host":"x","port":%b}' % DIGITS.encode()),
    ("/v1/rl/update_weights", "POST", b'{"weight_dir":"/x","tensors":' + DEEP + b"}"),
])  # fmt: skip
def test_what_an_operator_gets_wrong_is_said_by_name(
    target: Target, path: str, method: str, body: bytes
) -> None:
    admin = target.listeners["admin"]
    sent = admin.post(body, path=path) if body else admin.head(path=path, method=method)
    status, answer = admin.answer(sent)
    assert status == 400
    assert answer["error"]["param"]
