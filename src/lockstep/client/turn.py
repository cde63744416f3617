"""One turn as its caller sees it: the message, and the exact tokens it was parsed from."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.ledger import PromptPlan
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.render import Call, ParsedMessage
from lockstep.render.messages import Plain
from lockstep.tokens import Completion, Finish, VersionSpan
from lockstep.tokens.completion import Ranked


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn; its ids, logprobs and versions include the part sampled before an abort.

    `finish` is `tool_calls` if a call was parsed; `calls` also lists the failed attempts.
    """

    parsed: ParsedMessage
    completion: Completion
    token_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    bridged: bool = False
    cause: str | None = None

    @classmethod
    def of(cls, plan: PromptPlan, parsed: ParsedMessage, completion: Completion) -> Turn:
        """Build a turn from `completion` and the part sampled before an abort."""
        ids, logprobs = list(completion.token_ids), list(completion.logprobs)
        versions = list(completion.versions)
        node = plan.parent if plan.continues else None
        while node is not None:
            offset = len(node.sampled)
            shifted = [VersionSpan(s.version, s.start + offset, s.end + offset) for s in versions]
            versions = [*node.versions, *shifted]
            ids, logprobs = [*node.sampled, *ids], [*node.logprobs, *logprobs]
            node = node.parent if node.continues else None
        bridged = plan.bridged
        return cls(parsed, completion, ids, logprobs, tuple(versions), bridged, plan.cause)

    @property
    def text(self) -> str:
        return self.parsed.content

    @property
    def reasoning(self) -> str | None:
        return self.parsed.reasoning

    @property
    def tool_calls(self) -> tuple[Call, ...]:
        return self.parsed.tool_calls

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.parsed.calls

    @property
    def tool_parse_error(self) -> str | None:
        """Error of a tool call that could not be parsed and stayed in the text."""
        return self.parsed.tool_parse_error

    @property
    def finish(self) -> Finish:
        return self.parsed.finish(self.completion.finish)

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids sent to the engine for this turn, including the partial completion after an
        abort.
        """
        return as_list(self.completion.prompt_ids)

    @property
    def message(self) -> Plain:
        """The assistant message to append to a history."""
        return self.parsed.message()


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of tokens, each conditioned on the tokens before it; the first is 0.0.

    `version` labels the weights; `temperature` is the divisor of the logits. `top` are the
    likeliest tokens in the place of each token, if they were requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    version: str
    temperature: float
    top: list[tuple[Ranked, ...]] | None = None
