"""A verifiers client for Lockstep's sessions: chat, messages and responses, with their tokens.

verifiers' own train client renders prompts itself and rejects all dialects but chat. A Lockstep
gateway serves each dialect natively and has the tokens: this client forwards requests and stores
the tokens of every turn in the trace.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from verifiers.v1 import clients
from verifiers.v1.clients import client as client_module
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import BaseClientConfig, TrainClientConfig
from verifiers.v1.errors import model_error
from verifiers.v1.interception import server
from verifiers.v1.types import SamplingMask, TurnTokens

from lockstep.integrations.verifiers import streams
from lockstep.tokens.support import PackedSupport

SELECT_HEADER, SELECT_VALUE = "X-Lockstep", "sessions"
"""The header of a client config that selects this client. verifiers has a fixed set of client types
and sends configs to other processes as one of them, headers included."""
SELECT_VARIABLE = "LOCKSTEP_VERIFIERS"
"""The environment variable that selects it for every train client of a process."""
TOKENS = "X-Lockstep-Tokens"
STREAM_FIELDS = ("stream", "stream_options")


class LockstepClient(EvalClient):  # type: ignore[misc]  # verifiers is not installed where mypy runs
    """Forwards native requests to a gateway, in the session of their trace.

    The trace gets the sampled ids, their logprobs, and under info["lockstep"] the versions of every
    turn. A turn that the gateway bridged extends its branch.
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
        """Return the turn with its tokens. Raises verifiers' errors with the gateway's status."""
        unstreamed = {name: body[name] for name in body if name not in STREAM_FIELDS}
        headers = {**(headers or {}), TOKENS: "1"}
        response = await super().get_response(
            dialect, unstreamed, sampling, session_id=session_id, turn=turn, headers=headers
        )
        tokens = response.raw.pop("lockstep", None)
        if tokens is None:
            raise model_error(
                f"{self.base_url} sent no tokens: is it a Lockstep gateway of this version?",
                status_code=400,
            )
        extends = turn is not None and turn.path_len > 0
        response.tokens = TurnTokens(
            prompt_ids=tokens["prompt_ids"],
            completion_ids=tokens["token_ids"],
            completion_logprobs=tokens["logprobs"],
            bridged=bool(tokens["bridged"] and extends),
            sampling_mask=_sampling_mask(tokens["support"]),
        )
        if turn is not None:
            turns = turn.trace.info.setdefault("lockstep", {}).setdefault("turns", [])
            turns.append(_record(tokens))
        return response

    async def relay(self, *_: Any, **__: Any) -> Any:
        """Not used: verifiers builds the stream of a train client from the whole response."""
        raise NotImplementedError("this client does not relay streams")


def _sampling_mask(packed: Mapping[str, Any] | None) -> SamplingMask | None:
    """Return the sets that the tokens were drawn from in the form of verifiers."""
    if packed is None:
        return None
    return SamplingMask.from_sampling_mask(msgspec.convert(packed, PackedSupport).value().lists())


def _record(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a turn in the trace, besides its tokens; `key` identifies its node."""
    ids = [*tokens["prompt_ids"], *tokens["token_ids"]]
    return {
        "key": key_of(ids),
        "versions": tokens["versions"],
        "logprob_mode": tokens["logprob_mode"],
        "temperature": tokens["temperature"],
        "bridged": tokens["bridged"],
        "cause": tokens["cause"],
        "shaping": tokens["shaping"],
        "support": tokens["support"],
    }


def key_of(token_ids: list[int]) -> int:
    """Return a checksum of a token sequence."""
    return zlib.crc32(np.asarray(token_ids, dtype="<i8").tobytes())


def install() -> None:
    """Make verifiers use this client where the headers of a config or the environment select it.

    Call it in every process that runs environments. verifiers has no registry of clients, so its
    factory function is replaced.
    """
    original = client_module.resolve_client
    if getattr(original, "chooses_lockstep", False):
        return

    def resolve_client(config: BaseClientConfig) -> Any:
        headers = {name.lower(): value for name, value in config.headers.items()}
        selections = (headers.get(SELECT_HEADER.lower()), os.environ.get(SELECT_VARIABLE))
        if SELECT_VALUE in selections and isinstance(config, TrainClientConfig):
            return LockstepClient(config)
        return original(config)

    resolve_client.chooses_lockstep = True  # type: ignore[attr-defined]
    for module in (client_module, clients, server):
        module.resolve_client = resolve_client
    streams.install()
