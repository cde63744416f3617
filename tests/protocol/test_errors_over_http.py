"""Every error that leaves a process comes back as the same class with the same fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.fleet.remote import RemoteFleet
from lockstep.http.client.client import HttpClient
from lockstep.http.handlers import EXCEPTION_HANDLERS, EventStream
from lockstep.http.http_request import read_json
from lockstep.http.server.server import listen, serving, url_of
from lockstep.protocol.common.decode_error import error_of, raise_stated
from lockstep.protocol.common.error_body import error_fields
from lockstep.tokens.errors import (
    BY_CODE,
    EngineFailure,
    LockstepError,
    PrefixBreak,
    Unavailable,
)
from lockstep.tokens.operation import Operation, WorkerResult

RECORD = Operation(
    "0123", "update_weights", {"weight_dir": "/w", "version": None}, "k", "failed", 1.0, 2.0, "s_1",
    {"w0": WorkerResult("rolled_back", "prove", "off by 0.1", {"stage": 0.5}),
     "w1": WorkerResult("quarantined", "commit", "it hung")},
    0.25, ["look"], "why", "update_failed", "version", 502,
)  # fmt: skip


def example(kind: type[LockstepError]) -> LockstepError:
    """An error of this class in which every field has a value of its own."""
    own = {name: f"the {name}" for name in kind.fields}
    return kind("it was wrong", param="sampling.n", retry_after=2.5, operation=RECORD, **own)


def fields(error: LockstepError) -> dict[str, object]:
    return {"class": type(error), "args": error.args, **error.__dict__}


@asynccontextmanager
async def raising() -> AsyncIterator[str]:
    """A server whose routes raise the error that the request names by its code."""

    async def raise_it(http: Request) -> Response:
        body = msgspec.json.decode(await read_json(http, 1 << 20))
        raise example(BY_CODE[body["version"]])

    async def stream(http: Request) -> Response:
        body = msgspec.json.decode(await read_json(http, 1 << 20))

        async def events() -> AsyncIterator[bytes]:
            yield b"data: {}\n\n"
            raise example(BY_CODE[body["version"]])

        return EventStream(events())

    app = Starlette(
        routes=[Route("/v1/rl/update_weights", raise_it, methods=["POST"]),
                Route("/stream", stream, methods=["POST"])],
        exception_handlers=EXCEPTION_HANDLERS,
    )  # fmt: skip
    with listen("127.0.0.1", 0) as sock:
        async with serving([(app, sock)]):
            yield url_of(sock)


def test_every_class_of_the_package_has_a_code_of_its_own() -> None:
    def below(kind: type[LockstepError]) -> list[type[LockstepError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in below(child))]

    every = below(LockstepError)
    assert sorted(BY_CODE) == sorted(kind.code for kind in every)
    assert len(BY_CODE) == len(every) > 30
    for code in ("not_found", None):
        with pytest.raises(TypeError, match="needs a code that no other error has"):
            type("Twin", (LockstepError,), {} if code is None else {"code": code})


async def test_over_http_every_error_comes_back_as_it_was_raised() -> None:
    async with raising() as url:
        client = HttpClient(url, retries=0)
        for code, kind in BY_CODE.items():
            body = msgspec.json.encode({"version": code})
            with pytest.raises(LockstepError) as failed:
                await client.post("/v1/rl/update_weights", body)
            assert fields(failed.value) == fields(example(kind))
        await client.close()


async def test_a_remote_fleet_raises_what_the_fleet_raised_with_the_record_of_each_worker() -> None:
    async with raising() as url, RemoteFleet(url, token="t") as fleet:
        for code, kind in BY_CODE.items():
            with pytest.raises(LockstepError) as failed:
                await fleet.update_weights("/w", code)
            assert fields(failed.value) == fields(example(kind))
            assert failed.value.operation is not None
            assert failed.value.operation.workers["w1"].error == "it hung"


async def test_an_error_in_the_middle_of_a_stream_comes_back_too() -> None:
    async with raising() as url:
        client = HttpClient(url, retries=0)
        for code, kind in BY_CODE.items():
            body = msgspec.json.encode({"version": code})
            response = bytes(await client.post("/stream", body))
            event = response.split(b"\n\n")[1].removeprefix(b"data: ")
            with pytest.raises(kind) as failed:
                raise_stated(msgspec.json.decode(event, type=dict[str, msgspec.Raw])["error"])
            # The record of an operation is not part of a stream: no operation streams.
            assert fields(failed.value) == fields(example(kind)) | {"operation": None}
        await client.close()


def test_other_words_keep_every_field() -> None:
    for kind in BY_CODE.values():
        again = example(kind).with_message("worker w0: it was wrong")
        expected = fields(example(kind))
        expected |= {"message": "worker w0: it was wrong", "args": ("worker w0: it was wrong",)}
        assert fields(again) == expected


def test_a_server_that_leaves_fields_out_still_gets_a_typed_error() -> None:
    body = error_fields(PrefixBreak("it was edited", cause="edited_history"))
    error = body["error"]
    assert isinstance(error, dict)
    del error["cause"]
    read = error_of(409, msgspec.json.encode(body | {"operation": {"of": "another release"}}))
    assert (type(read).code, read.message, read.operation) == ("conflict", "it was edited", None)


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ({"details": {"backend_status": 500}}, EngineFailure),
        ({}, Unavailable),
        ({"details": {}}, Unavailable),
        ({"object": "error"}, EngineFailure),  # SGLang's form, which is flat as well
    ],
)
def test_a_frontend_of_dynamo_that_fails_by_itself_is_not_its_engine(
    details: dict[str, Any], kind: type[LockstepError]
) -> None:
    """Another worker is tried then, and clients are told to come back."""
    body = {"message": "Internal server error", "type": "Internal Server Error", "code": 500}
    assert type(error_of(500, msgspec.json.encode(body | details))) is kind


def test_a_page_of_html_is_named_and_not_printed() -> None:
    page = (
        b"<!DOCTYPE HTML>\n<html><head><title>Error response</title></head><body>...</body></html>"
    )
    message = error_of(404, page).message
    assert message == (
        "the server answered 404 with a page of HTML 'Error response': it is no server of models"
    )
    assert error_of(502, b"upstream is away").message == "the server answered 502: upstream is away"
