"""The worker's data plane for requests of Dynamo's frontend instead of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from lockstep.tokens.errors import BadRequest, EngineFailure, LockstepError, Unavailable
from lockstep.worker.data import DataPlane, prefixed
from lockstep.worker.dynamo.chunks import Chunk, chunks_of, collected
from lockstep.worker.dynamo.request import DynamoRequest, read_request

log = logging.getLogger(__name__)


class DynamoData(DataPlane):
    """Generates for Dynamo's frontend; requests are read and refused as the HTTP port does it."""

    async def serve(self, fields: dict[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """The chunks of one request. Ends the engine's work when the frontend does not want it."""
        with _dynamo_errors():
            if self.draining:
                raise Unavailable("this worker is shutting down: send the request to another one")
            has_experts = bool(self.engine.core.config.moe_layers)
            request = read_request(fields, has_experts=has_experts)
            engine_request = self._request(request.body, prefixed(context.id()))
            async with aclosing(collected(self.engine.stream(engine_request))) as groups:
                gone = asyncio.ensure_future(context.async_killed_or_stopped())
                try:
                    while (pieces := await _next_unless(gone, groups)) is not None:
                        for chunk in chunks_of(pieces, engine_data=request.engine_data):
                            _check_tellable(request, chunk)
                            yield chunk
                finally:
                    gone.cancel()


async def _next_unless(gone: asyncio.Future[bool], groups: AsyncGenerator[Any, None]) -> Any:
    """The next group; None when there is none, or when nobody wants it any more."""
    coming = asyncio.ensure_future(anext(groups, None))
    try:
        await asyncio.wait((gone, coming), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


def _check_tellable(request: DynamoRequest, chunk: Chunk) -> None:
    """Raises EngineFailure for an abort that the response would call a stop."""
    if request.verbatim and chunk.get("finish_reason") == "cancelled":
        raise EngineFailure("the generation was aborted, which this route cannot say")


@contextmanager
def _dynamo_errors() -> Iterator[None]:
    """Errors as the frontend understands them; it shows the words of bad requests only."""
    try:
        yield
    except BadRequest as error:
        raise InvalidArgument(error.message) from None
    except Unavailable as error:
        raise EngineShutdown(error.message) from None
    except LockstepError as error:
        log.warning("a request failed: %s", error.message)
        raise HttpError(error.status, error.message) from None
