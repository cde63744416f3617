"""The tokens of one choice that have arrived, and the message that they say so far."""

from __future__ import annotations

from array import array

from lockstep.protocol.common.response import Provenance, StreamDelta
from lockstep.render.streaming_parser import MessagePart, StreamingParser
from lockstep.tokens import Completion
from lockstep.tokens.errors import Misaligned


class ChoiceProgress:
    """The tokens of one choice that have arrived, and the parser of its message.

    `versions` has each version with the first of its tokens, None where the stream did not tell.
    """

    def __init__(self, parser: StreamingParser) -> None:
        self.parser = parser
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.made: Provenance | None = None
        self.versions: list[tuple[str | None, int]] = []

    def add(self, delta: StreamDelta) -> MessagePart:
        """Take new tokens and return the part of the message that they complete."""
        if delta.token_ids:
            self.made = delta.made
            version = None if delta.made is None else delta.made.version
            if not self.versions or self.versions[-1][0] != version:
                self.versions.append((version, len(self.token_ids)))
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        return self.parser.feed(delta.token_ids)

    def complete(self, completion: Completion) -> None:
        """Take the finished choice. Raises Misaligned unless it starts with what was streamed."""
        count = len(self.token_ids)
        if completion.token_ids[:count] != self.token_ids or (
            len(self.logprobs) == count
            and _as_float32(completion.logprobs[:count]) != _as_float32(self.logprobs)
        ):
            raise Misaligned(
                f"choice {completion.index}: the finished choice does not begin with the {count} "
                "tokens that were streamed"
            )
        self.token_ids, self.logprobs = completion.token_ids, completion.logprobs


def _as_float32(logprobs: list[float]) -> array[float]:
    # Dynamo streams the shortest decimals of 32-bit floats and ends with the same numbers as
    # doubles: -0.12345679 and -0.12345679104328156 are one logprob.
    return array("f", logprobs)
