"""verifiers' client on Lockstep's sessions: chat, messages and responses, with their tokens.

verifiers' own train client renders prompts itself, and refuses all dialects but chat. A gateway of
Lockstep answers each dialect natively and knows the tokens: this client passes requests on, and
takes the tokens of every turn into the trace.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from verifiers.v1 import clients
from verifiers.v1.clients import client as client_module
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import BaseClientConfig, TrainClientConfig
from verifiers.v1.errors import model_error
from verifiers.v1.interception import server
from verifiers.v1.types import TurnTokens

from lockstep.integrations.verifiers import streams

CHOICE, CHOSEN = "X-Lockstep", "sessions"
"""The header of a client config that chooses this client. verifiers has a closed set of client
types, and a config goes to other processes as one of them: headers go along."""
EVERYWHERE = "LOCKSTEP_VERIFIERS"
"""The environment variable that chooses it for every train client of a process."""
TOKENS = "X-Lockstep-Tokens"


class LockstepClient(EvalClient):  # type: ignore[misc]  # verifiers is not there when checked
    """Passes native requests on to a gateway, in the session of their trace.

    The trace gets the ids that were sampled, their logprobs, and under info["lockstep"] the
    versions of every turn. What the gateway bridged extends its branch, or is an error.
    """

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The turn, with its tokens. Raises verifiers' own errors with the gateway's status."""
        whole = {name: body[name] for name in body if name not in ("stream", "stream_options")}
        sent = {**(headers or {}), TOKENS: "1"}
        response = await super().get_response(
            dialect, whole, sampling, session_id=session_id, turn=turn, headers=sent
        )
        tokens = response.raw.pop("lockstep", None)
        if tokens is None:
            raise model_error(
                f"{self.base_url} sent no tokens: it is no gateway of Lockstep, or an old one",
                status_code=400,
            )
        extends = turn is not None and turn.path_len > 0
        response.tokens = TurnTokens(
            prompt_ids=tokens["prompt_ids"],
            completion_ids=tokens["token_ids"],
            completion_logprobs=tokens["logprobs"],
            bridged=bool(tokens["bridged"] and extends),
        )
        if turn is not None:
            turns = turn.trace.info.setdefault("lockstep", {}).setdefault("turns", [])
            turns.append(_record(tokens))
        return response

    async def relay(self, *_: Any, **__: Any) -> Any:
        """Not used: a train client's streams are framed from the whole response."""
        raise NotImplementedError("streams of this client are made from whole responses")


def _record(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """What the trace keeps of a turn beside its tokens; `key` finds its node again."""
    ids = [*tokens["prompt_ids"], *tokens["token_ids"]]
    return {
        "key": key_of(ids),
        "versions": tokens["versions"],
        "logprob_mode": tokens["logprob_mode"],
        "temperature": tokens["temperature"],
        "bridged": tokens["bridged"],
        "cause": tokens["cause"],
    }


def key_of(token_ids: list[int]) -> int:
    """A number for a sequence of ids: the same for equal ones."""
    return zlib.crc32(np.asarray(token_ids, dtype="<i8").tobytes())


def install() -> None:
    """Has verifiers use this client where a config's headers, or the environment, choose it.

    Call it in every process that runs environments. verifiers has no registry of clients: its
    factory is replaced by one that asks for the choice first.
    """
    original = client_module.resolve_client
    if getattr(original, "chooses_lockstep", False):
        return

    def resolve_client(config: BaseClientConfig) -> Any:
        named = {name.lower(): value for name, value in config.headers.items()}
        chosen = named.get(CHOICE.lower()) == CHOSEN or os.environ.get(EVERYWHERE) == CHOSEN
        if chosen and isinstance(config, TrainClientConfig):
            return LockstepClient(config)
        return original(config)

    resolve_client.chooses_lockstep = True  # type: ignore[attr-defined]
    for module in (client_module, clients, server):
        module.resolve_client = resolve_client
    streams.install()
