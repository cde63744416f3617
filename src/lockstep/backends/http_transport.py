"""Base of all transports over HTTP: the client, the model cards, and the decoding of responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from lockstep.backends.model_limits import ModelLimits
from lockstep.backends.transport import ModelCard, Relay, TransportName
from lockstep.http.client.client import HttpClient
from lockstep.http.off_loop import is_large_json, off_loop
from lockstep.protocol.common.model_card import decode_models
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import UNKNOWN_VERSION, Reading
from lockstep.protocol.json.base64_extract import ExtractedBody
from lockstep.tokens import LogprobMode

P = ParamSpec("P")
T = TypeVar("T")


class HttpTransport:
    """One server behind an `HttpClient`, which owns deadlines and retries.

    `logprob_mode` is how the server computes logprobs where its responses do not say; by default
    `usual_mode`, the default of such servers. `version` labels the tokens of servers that report no
    weight version.
    """

    name: TransportName
    usual_mode: LogprobMode
    aborts_by_id: bool
    gives_choices: bool

    def __init__(
        self,
        http: HttpClient,
        *,
        logprob_mode: LogprobMode | None = None,
        version: str | None = None,
    ) -> None:
        self._http = http
        self._mode: LogprobMode = logprob_mode or self.usual_mode
        self._version = UNKNOWN_VERSION if version is None else version
        self._limits = ModelLimits(self.models)

    @property
    def base_url(self) -> str:
        return self._http.base_url

    @property
    def relay(self) -> Relay | None:
        """None: the dialect is not the gateway's own, so bodies must be encoded anew."""
        return None

    async def models(self) -> list[ModelCard]:
        """Return the models and adapters that the server lists now."""
        return decode_models(await self._http.get("/v1/models"))

    async def close(self) -> None:
        await self._http.close()

    async def _decode(
        self,
        decode: Callable[Concatenate[ExtractedBody, P], T],
        response: ExtractedBody,
        *more: P.args,
        **options: P.kwargs,
    ) -> T:
        """Decode a response; a large one in a thread."""
        large = is_large_json(len(response.json))
        return await off_loop(large, decode, response, *more, **options)

    def _reading(self, request: GenerateRequest, card: ModelCard | None, index: int = 0) -> Reading:
        """Return what the decoder of a response to `request` needs beside the body."""
        adapter = card.id if card is not None and card.parent else None
        return Reading(request, self._mode, self._version, self.base_url, adapter, index)
