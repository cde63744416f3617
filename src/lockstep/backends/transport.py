"""The data side of a backend: send token ids with how to sample, get completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import StreamDelta
from lockstep.tokens import Completion
from lockstep.tokens.numerics import NumericsPlan

__all__ = ["GenerateRequest", "ModelCard", "StreamDelta", "Transport", "TransportName"]

TransportName = Literal["vllm", "dynamo", "dynamo-generate", "sglang"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model, or an adapter whose `parent` is its base model.

    `numerics` is how its workers compute, where the server tells.
    """

    id: str
    max_model_len: int | None = None
    weight_version: str | None = None
    parent: str | None = None
    owned_by: str | None = None
    numerics: NumericsPlan | None = None


class Transport(Protocol):
    """Talks to one server in its dialect. Every method raises LockstepError, nothing of HTTP."""

    @property
    def name(self) -> TransportName: ...

    @property
    def base_url(self) -> str: ...

    async def generate(self, ask: GenerateRequest) -> list[Completion]:
        """The n completions in order of their index. Cancelling it stops the server's work."""
        ...

    def stream(self, ask: GenerateRequest) -> AsyncGenerator[StreamDelta | Completion, None]:
        """Deltas as they come, then the n completions, equal to those `generate` would give.

        Closing the iterator early closes the connection, so that the server stops.
        """
        ...

    async def models(self) -> list[ModelCard]:
        """What is served now, asked anew."""
        ...

    async def abort(self, request_id: str) -> int | None:
        """Asks the server to end that request; how many it stopped, or None if it does not tell."""
        ...

    async def close(self) -> None:
        """Closes the connections. The transport cannot be used after."""
        ...
