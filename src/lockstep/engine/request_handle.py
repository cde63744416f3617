"""A request on its way through the engine, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.engine.sequence import EngineRequest, Sequence, StreamedToken
from lockstep.tokens import Completion, LockstepError

Event = StreamedToken | list[Completion] | LockstepError


class RequestHandle:
    """The sequences of a request, and where its events go (`deliver`)."""

    def __init__(
        self, request: EngineRequest, deliver: Callable[[Event], None], *, stream: bool = False
    ) -> None:
        self.request = request
        self.deliver = deliver
        self.stream = stream
        self.sequences: list[Sequence] = []
        self.completions: dict[int, Completion] = {}
