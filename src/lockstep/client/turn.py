"""One turn as its caller sees it: the message, and the exact tokens it was parsed from."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.ledger import PromptPlan
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.render import Call, ParsedMessage
from lockstep.render.messages import Plain
from lockstep.tokens import Completion, Finish, VersionSpan


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn; its ids, logprobs and versions include parts from before an abort.

    `finish` is `tool_calls` when a call really parsed; `calls` also lists the attempts that failed.
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
        """The turn that `completion` ended, after what an abort had left of it (`plan.partial`)."""
        ids, logprobs = list(completion.token_ids), list(completion.logprobs)
        versions = list(completion.versions)
        node = plan.parent if plan.continues else None
        while node is not None:
            kept = len(node.sampled)
            shifted = [VersionSpan(s.version, s.start + kept, s.end + kept) for s in versions]
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
        """What is wrong with a tool call that could not be read and stayed in the text."""
        return self.parsed.tool_parse_error

    @property
    def finish(self) -> Finish:
        return self.parsed.finish(self.completion.finish)

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine was sent for this turn (with the partial completion, after an abort)."""
        return as_list(self.completion.prompt_ids)

    @property
    def message(self) -> Plain:
        """The assistant message to hand on."""
        return self.parsed.message()


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of tokens, each conditioned on those before it; the first has 0.0.

    `version` labels the weights, `temperature` what the logits were divided by.
    """

    token_ids: list[int]
    logprobs: list[float]
    version: str
    temperature: float
