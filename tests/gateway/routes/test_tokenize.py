"""/tokenize and /detokenize over HTTP: vLLM's two forms, and a 400 for anything unclear."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from starlette.applications import Starlette

from lockstep.backends.transport import ModelCard
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.routes.tokenize import TokenizeRoutes
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.http.server.server import listen, serving, url_of
from lockstep.render import Renderer

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
ODD = "héllo 你好 😀 🧑‍🚀 <|im_start|>x\n"


class Client:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def tokens(self, **body: Any) -> dict[str, Any]:
        status, response = await self.post("/tokenize", body)
        assert status == 200, response
        return dict(response)

    async def refused(self, path: str, **body: Any) -> dict[str, Any]:
        status, response = await self.post(path, body)
        assert status == 400, response
        assert response["error"]["request_id"]
        return dict(response["error"])


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async def models() -> list[ModelCard]:
        return [ModelCard("tiny", 1024, "0"), ModelCard("lora", 1024, "0", parent="tiny")]

    context = GatewayContext(pool=Pool(), models=ModelRegistry(models, "tiny"), sessions=Sessions())
    app = Starlette(routes=TokenizeRoutes(context).routes, exception_handlers=EXCEPTION_HANDLERS)
    with listen("127.0.0.1", 0) as sock:
        async with serving([(app, sock)]), aiohttp.ClientSession() as http:
            yield Client(url_of(sock), http)


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer.load("tiny")


@pytest.mark.failure_mode("F41")
async def test_a_prompt_gets_special_tokens_by_default_and_a_chat_does_not(
    client: Client, renderer: Renderer
) -> None:
    tokenized = await client.tokens(prompt="Hello, world!")
    ids = renderer.encode("Hello, world!", special=True)
    assert tokenized == {
        "count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": None,
    }  # fmt: skip
    bare = await client.tokens(prompt="Hello, world!", add_special_tokens=False)
    assert bare["tokens"] == renderer.encode("Hello, world!")
    chat = await client.tokens(messages=HI)
    assert chat["tokens"] == renderer.render(HI)
    assert (await client.tokens(prompt=""))["count"] == 0


async def test_the_flags_of_a_chat_are_vllms(client: Client, renderer: Renderer) -> None:
    closed = await client.tokens(messages=HI, add_generation_prompt=False)
    assert closed["tokens"] == renderer.render(HI, add_generation_prompt=False)
    tools = await client.tokens(messages=HI, tools=TOOLS)
    assert tools["tokens"] == renderer.render(HI, TOOLS)
    quiet = await client.tokens(messages=HI, chat_template_kwargs={"enable_thinking": False})
    assert renderer.decode(quiet["tokens"]).endswith("<think>\n\n</think>\n\n")
    started = [*HI, {"role": "assistant", "content": "Hello the"}]
    open_ended = await client.tokens(
        messages=started, continue_final_message=True, add_generation_prompt=False
    )
    assert renderer.decode(open_ended["tokens"]).endswith("Hello the")


@pytest.mark.failure_mode("F41")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HI}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "x", "tools": TOOLS}, "tools"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            {"messages": HI, "chat_template_kwargs": {"add_generation_prompt": False}},
            "chat_template_kwargs.add_generation_prompt",
        ),
        (
            {"messages": HI, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs.tools",
        ),
        ({"messages": HI, "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"prompt": "x", "bogus": 1}, "bogus"),
    ],
)
async def test_an_unclear_question_is_refused_by_name(
    client: Client, body: dict[str, Any], param: str
) -> None:
    assert (await client.refused("/tokenize", **body))["param"] == param


async def test_the_model_may_be_left_out_and_an_unknown_one_is_404(client: Client) -> None:
    assert await client.tokens(prompt="x", model="lora") == await client.tokens(prompt="x")
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        status, response = await client.post(path, {**body, "model": "nope"})
        assert (status, response["error"]["reason"]) == (404, "unknown_model")


@pytest.mark.failure_mode("F40")
async def test_parts_of_a_character_keep_their_bytes(client: Client, renderer: Renderer) -> None:
    tokenized = await client.tokens(prompt=ODD, return_token_strs=True, return_token_bytes=True)
    assert len(tokenized["token_strs"]) == len(tokenized["token_bytes"]) == tokenized["count"]
    assert b"".join(map(bytes, tokenized["token_bytes"])).decode() == ODD
    whole = renderer.tokenizer.convert_tokens_to_ids(tokenized["token_strs"])
    assert whole == tokenized["tokens"]
    status, response = await client.post(
        "/v1/detokenize", {"tokens": tokenized["tokens"], "return_token_bytes": True}
    )
    assert (status, response["prompt"]) == (200, ODD)
    assert response["token_bytes"] == tokenized["token_bytes"]


async def test_both_routes_stand_under_v1_too(client: Client) -> None:
    status, response = await client.post("/v1/tokenize", {"prompt": "x"})
    assert (status, response) == (200, await client.tokens(prompt="x"))
    assert await client.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


@pytest.mark.failure_mode("F39")
@pytest.mark.failure_mode("F18")
@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        ([71, 512], "tokens[1]"),
        ([-1], "tokens[0]"),
        ([71, 2**40], "tokens[1]"),
        ([10**30], "tokens[0]"),
        ([71, "72"], "tokens[1]"),
        ([71.0], "tokens[0]"),
        ([True], "tokens[0]"),
        (None, "tokens"),
    ],
)
async def test_an_id_that_is_none_is_named(client: Client, tokens: Any, param: str) -> None:
    assert (await client.refused("/detokenize", tokens=tokens))["param"] == param


async def test_the_prompt_starts_with_every_id_of_a_required_prefix(
    client: Client, renderer: Renderer
) -> None:
    messages = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"}]
    # Not how the tokenizer would write it: one token for each letter.
    letters = [renderer.encode(letter)[0] for letter in "Hello"]
    prefix = [*renderer.render(HI), *letters, renderer.stop_token_ids[0]]
    tokenized = await client.tokens(messages=messages, required_prefix_token_ids=prefix)
    assert tokenized["tokens"][: len(prefix)] == prefix
    rest = renderer.decode(tokenized["tokens"][len(prefix) :])
    assert rest == "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("closed", [False, True])
async def test_a_prefix_that_ends_in_a_user_turn_is_opened_for_a_reply(
    client: Client, renderer: Renderer, closed: bool
) -> None:
    """NeMo-RL's own test sends its whole chat body, sampling fields and all."""
    whole = renderer.render(HI)
    end = max(at for at, token in enumerate(whole) if token in renderer.stop_token_ids)
    text = HI[0]["content"]
    letters = [renderer.encode(letter)[0] for letter in text]
    start = len(renderer.encode("<|im_start|>user\n"))
    kept = [*whole[:start], *letters]
    assert renderer.decode(kept) == renderer.decode(whole[:end])
    sampling = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_tokens": 1,
                "return_tokens_as_token_ids": True}  # fmt: skip
    prefix = [*kept, whole[end]] if closed else kept
    tokenized = await client.tokens(messages=HI, required_prefix_token_ids=prefix, **sampling)
    assert tokenized["tokens"] == [*kept, *whole[end:]]
    assert (await client.tokens(messages=HI, **sampling))["tokens"] == whole
    error = await client.refused(
        "/tokenize", messages=HI, required_prefix_token_ids=[*kept, letters[0]]
    )
    assert error["param"] == "required_prefix_token_ids"


@pytest.mark.parametrize(
    ("spoil", "reply"),
    [
        (lambda prefix: prefix[1:], "Hello"),
        (lambda prefix: prefix, "Something else"),
        (lambda prefix: [*prefix, 10**6], "Hello"),
        (lambda prefix: [], "Hello"),
    ],
)
async def test_a_prefix_that_is_not_of_these_messages_is_refused(
    client: Client, renderer: Renderer, spoil: Any, reply: str
) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "More"},
    ]
    prefix = [*renderer.render(HI), *renderer.encode("Hello"), renderer.stop_token_ids[0]]
    error = await client.refused(
        "/tokenize", messages=messages, required_prefix_token_ids=spoil(prefix)
    )
    assert error["param"].startswith("required_prefix_token_ids")
