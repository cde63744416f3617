"""One answer as its caller sees it: what was said, and the exact tokens that said it."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.ledger import PromptPlan
from lockstep.protocol.common.lazy_ids import as_list
from lockstep.render import Call, ParsedMessage
from lockstep.render.messages import Plain
from lockstep.tokens import Completion, Finish, VersionSpan


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer. token_ids, logprobs and versions are of the whole turn, parts before an abort too.

    `finish` is `tool_calls` when a call really parsed; `calls` also lists the attempts that failed.
    """

    answer: ParsedMessage
    completion: Completion
    token_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    bridged: bool = False
    cause: str | None = None

    @classmethod
    def of(cls, plan: PromptPlan, answer: ParsedMessage, completion: Completion) -> Turn:
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
        return cls(answer, completion, ids, logprobs, tuple(versions), bridged, plan.cause)

    @property
    def text(self) -> str:
        return self.answer.content

    @property
    def reasoning(self) -> str | None:
        return self.answer.reasoning

    @property
    def tool_calls(self) -> tuple[Call, ...]:
        return self.answer.tool_calls

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.answer.calls

    @property
    def finish(self) -> Finish:
        return self.answer.finish(self.completion.finish)

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine was sent for this turn (with the partial answer, after an abort)."""
        return as_list(self.completion.prompt_ids)

    @property
    def message(self) -> Plain:
        """The assistant message to hand on."""
        return self.answer.message()


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of given tokens, each given those before it; the first, given nothing, has 0.0.

    `version` labels the weights, `temperature` what the logits were divided by.
    """

    token_ids: list[int]
    logprobs: list[float]
    version: str
    temperature: float
