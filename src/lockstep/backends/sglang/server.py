"""Facts about one SGLang server that neither its model list nor its responses tell."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import msgspec

from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.model_card import ModelCard
from lockstep.tokens.errors import BadRequest

GENERATE = "/generate"
SERVER_INFO = "/server_info"
BEYOND = 2**31 - 1
"""A token id outside every vocabulary."""
QUESTION = msgspec.json.encode(
    {"input_ids": [0], "token_ids_logprob": [BEYOND], "sampling_params": {"max_new_tokens": 1}}
)
RANGE = re.compile(r"valid range is \[0, (\d+)\)")


class StartArguments(msgspec.Struct):
    """The arguments that the server was started with, which weight updates do not change, and the
    seconds that the parts of its start took."""

    served_model_name: str | None = None
    model_path: str | None = None
    device: str | None = None
    dtype: str | None = None
    tp_size: int = 1
    startup_time: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def incarnation(self) -> str:
        """Identity of the server's process: no two starts take the same time to the nanosecond."""
        return blake2b(bytes(self.startup_time), digest_size=8).hexdigest()


async def vocabulary_size(http: HttpClient) -> int | None:
    """Return the size of the model's vocabulary, or None where the server does not tell it.

    No route reports it. The rejection of a request for the logprob of an id that cannot exist does:
    the server checks that id before the request reaches the model, unlike those of the prompt.
    """
    try:
        await http.post(GENERATE, QUESTION)
    except BadRequest as rejection:
        match = RANGE.search(rejection.message)
        return None if match is None else int(match[1])
    return None


class ServedNames:
    """The names of a server's base model, by the name that it lists.

    A weight update changes the listed name to the path of the checkpoint. Clients keep using the
    name that the server was started with.
    """

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._started_with: dict[str, str] = {}

    async def restore(self, cards: list[ModelCard]) -> list[ModelCard]:
        """Return the cards with the name that the server was started with, also as `parent`."""
        listed = [card.id for card in cards if card.parent is None and Path(card.id).is_absolute()]
        names: dict[str | None, str] = {name: await self._name(name) for name in listed}
        return [
            replace(
                card, id=names.get(card.id, card.id), parent=names.get(card.parent, card.parent)
            )
            for card in cards
        ]

    async def _name(self, listed: str) -> str:
        if listed not in self._started_with:
            info = decode_server_info(await self._http.get(SERVER_INFO))
            self._started_with[listed] = info.served_model_name or listed
        return self._started_with[listed]


def decode_server_info(body: bytes | bytearray) -> StartArguments:
    """Return what the server reports of its arguments; the defaults where it is no such report."""
    try:
        return msgspec.json.decode(body, type=StartArguments)
    except msgspec.DecodeError:
        return StartArguments()
