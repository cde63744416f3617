"""The worker's data plane for requests from Dynamo's frontend instead of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from lockstep.tokens.errors import BadRequest, EngineFailure, LockstepError, Unavailable
from lockstep.worker.data import DataPlane, engine_request_id
from lockstep.worker.dynamo.chunks import Chunk, chunks_of, collect
from lockstep.worker.dynamo.request import DynamoRequest, read_request

log = logging.getLogger(__name__)


class DynamoData(DataPlane):
    """Data plane for Dynamo's frontend. Requests are decoded and rejected as on the HTTP port."""

    async def serve(self, fields: dict[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one request. Stops the engine's work when the frontend cancels."""
        with _dynamo_errors():
            if self.draining:
                raise Unavailable("this worker is shutting down: send the request to another one")
            has_experts = bool(self.engine.core.config.moe_layers)
            request = read_request(fields, has_experts=has_experts)
            engine_request = self._request(request.body, engine_request_id(context.id()))
            async with aclosing(collect(self.engine.stream(engine_request))) as groups:
                cancelled = asyncio.ensure_future(context.async_killed_or_stopped())
                try:
                    while (pieces := await _next_unless(cancelled, groups)) is not None:
                        for chunk in chunks_of(pieces, engine_data=request.engine_data):
                            _check_expressible(request, chunk)
                            yield chunk
                finally:
                    cancelled.cancel()


async def _next_unless(cancelled: asyncio.Future[bool], groups: AsyncGenerator[Any, None]) -> Any:
    """Return the next group, or None at the end or when the frontend has cancelled."""
    next_group = asyncio.ensure_future(anext(groups, None))
    try:
        await asyncio.wait((cancelled, next_group), return_when=asyncio.FIRST_COMPLETED)
        return next_group.result() if next_group.done() else None
    finally:
        if not next_group.done():
            next_group.cancel()
            await asyncio.gather(next_group, return_exceptions=True)


def _check_expressible(request: DynamoRequest, chunk: Chunk) -> None:
    """Raise EngineFailure for an abort that the response could only report as a stop."""
    if request.verbatim and chunk.get("finish_reason") == "cancelled":
        raise EngineFailure("the generation was aborted, which this route cannot express")


@contextmanager
def _dynamo_errors() -> Iterator[None]:
    """Convert errors to Dynamo's classes. The frontend shows the message of bad requests only."""
    try:
        yield
    except BadRequest as error:
        raise InvalidArgument(error.message) from None
    except Unavailable as error:
        raise EngineShutdown(error.message) from None
    except LockstepError as error:
        log.warning("a request failed: %s", error.message)
        raise HttpError(error.status, error.message) from None
