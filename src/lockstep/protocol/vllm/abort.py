"""vLLM's POST /inference/v1/abort_requests."""

from __future__ import annotations

import msgspec

from lockstep.protocol.json.strict import decode


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    request_ids: list[str]


_DECODER = msgspec.json.Decoder(AbortRequest)


def decode_abort(body: bytes) -> AbortRequest:
    """Decode the request in `body`. Raises BadRequest or UnknownField."""
    return decode(_DECODER, body)
