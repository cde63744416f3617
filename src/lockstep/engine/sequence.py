"""A request inside the engine: its options, its choices, and the delivery of its events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.model.lora import Adapter
from lockstep.engine.processing import TokenCounts, TokenLists
from lockstep.engine.sampler import Sampled
from lockstep.engine.text.grammar_process import GrammarMatcher, GrammarProcess
from lockstep.engine.text.vocabulary import Vocabulary
from lockstep.tokens import Completion, Finish, LockstepError, PromptLogprob, Ranked, Sampling
from lockstep.tokens.errors import BadRequest, PromptTooLong
from lockstep.tokens.ids import check_ids
from lockstep.tokens.stop_strings import StopMatch, StopMatcher
from lockstep.tokens.support import SupportRow


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request to the engine.

        EngineRequest(prompt_ids=[1, 2, 3], sampling=Sampling(max_tokens=16, temperature=0.0))

    A lower `priority` runs sooner. `experts_start` requests routed experts from that token on.
    `support` requests the set of tokens that each token was drawn from, where the options restrict
    it. `weight_version` requires every token to be sampled under exactly that version;
    `min_weight_version` requires that the version has been committed here, now or earlier. `tenant`
    is the caller whose share of the grammar processes the request uses.
    """

    prompt_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    request_id: str = ""
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    experts_start: int | None = None
    support: bool = False
    weight_version: str | None = None
    min_weight_version: str | None = None
    skip_prefix_cache: bool = False
    tenant: str = ""
    earlier: Completion | None = None
    """The first tokens of the choice, sampled before under other weights. Generation goes on after
    them, with the same seed, as it does after an update. Only for n = 1."""

    def check(self, config: ModelConfig, max_len: int) -> None:
        """Raise BadTokenId, PromptTooLong or BadRequest if this model cannot run the request."""
        check_ids(self.prompt_ids, config.vocab_size)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if ids := getattr(self.sampling, name):
                check_ids(list(ids), config.vocab_size, name)
        if not self.sampling.fits(len(self.prompt_ids), max_len):
            raise PromptTooLong.of(len(self.prompt_ids), max_len, param="token_ids")
        if self.earlier is not None and self.sampling.n != 1:
            raise BadRequest(f"n is {self.sampling.n} beside earlier tokens: expected 1", param="n")
        start = self.experts_start
        if start is not None and (start < 0 or not config.moe_layers):
            reason = f"{start} is negative" if start < 0 else "but this model has none"
            raise BadRequest(
                f"routed experts were requested, {reason}", param="routed_experts_prompt_start"
            )
        allowed = self.sampling.allowed_token_ids
        ends = self.end_ids(config.eos_ids)
        if self.sampling.min_tokens and allowed and set(allowed) <= set(ends):
            raise BadRequest(
                "allowed_token_ids leaves only end tokens, but min_tokens forbids to end at once",
                param="min_tokens",
            )

    def end_ids(self, eos_ids: frozenset[int]) -> tuple[int, ...]:
        """Return the token ids that end a choice, for a model with these end-of-sequence ids."""
        sampling = self.sampling
        return (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids))


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """The event of one choice in one step: a token, the final completion, or both.

    `version` is that of the token, where it comes alone.
    """

    index: int
    sampled: Sampled | None
    completion: Completion | None = None
    version: str | None = None


Event = StreamedToken | list[Completion] | LockstepError
"""A streamed token, all completions of a request without streaming, or the error that ended it."""


class Sequence:
    """One choice of a request.

    `tokens` holds prompt and output; `computed` counts those whose keys and values are cached.
    `leader` is the first choice of the request, or None for the first choice itself.
    """

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        seed: int,
        max_len: int,
        eos_ids: frozenset[int],
        vocabulary: Vocabulary,
        matcher: GrammarMatcher | None = None,
        leader: Sequence | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.leader = leader
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(request.prompt_ids)
        self.computed = 0
        limit = request.sampling.max_tokens
        self.max_total = max_len if limit is None else min(max_len, self.prompt_len + limit)
        self.end_ids = request.end_ids(eos_ids)
        self.shaping = request.sampling.shaping(tuple(eos_ids))
        self._eos_ids = frozenset[int]() if request.sampling.ignore_eos else eos_ids
        self.adapter: Adapter | None = None
        self.root = b""
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.tops: list[tuple[Ranked, ...]] = []
        self.versions: list[str] = []
        recorded = request.support and self.shaping is not None and self.shaping.restricts
        self.supports: list[SupportRow] | None = [] if recorded else None
        self.prompt_logprobs: list[PromptLogprob | None] = [None]
        self.old_experts: Tensor | None = None
        self.finish: Finish | None = None
        self.stop_token: int | None = None
        self.stop_match: StopMatch | None = None
        self._stops = StopMatcher(request.sampling.stop) if request.sampling.stop else None
        self._vocabulary = vocabulary
        self.counts: TokenCounts | None = None
        self.lists: TokenLists | None = None
        self.matcher = matcher
        self.error: LockstepError | None = None
        """Why the prompt could not be scored. The choice fails with it at its next token."""

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether part of the prompt must still be scored. Only the first choice scores it."""
        requested = self.request.sampling.prompt_logprobs is not None and self.leader is None
        return requested and len(self.prompt_logprobs) < self.prompt_len

    @property
    def ready(self) -> bool:
        """Whether the sequence may be admitted. Later choices wait for the prompt of the first."""
        leader = self.leader
        return leader is None or leader.finish is not None or leader.computed >= self.prompt_len

    @property
    def begun(self) -> bool:
        """Whether the request is in flight, even if this choice is still waiting."""
        return bool((self.leader or self).root)

    def take_over(self, earlier: Completion) -> None:
        """Add tokens that were sampled before, under the versions they carry."""
        for span in earlier.versions:
            for at in range(span.start, span.end):
                token, logprob = earlier.token_ids[at], earlier.logprobs[at]
                self.append(Sampled(token, logprob, 0, ()), span.version)

    def append(self, sampled: Sampled, version: str) -> Finish | None:
        """Add a token; return the finish reason if it is the last one, else None."""
        token = sampled.token_id
        self.tokens.append(token)
        self.logprobs.append(sampled.logprob)
        self.ranks.append(sampled.rank)
        self.tops.append(sampled.top)
        self.versions.append(version)
        if self.supports is not None and sampled.support is not None:
            self.supports.append(sampled.support)
        if self.counts is not None:
            self.counts.add(token)
        # End tokens are not part of a grammar or a stop string, so they are checked first.
        if token in self._eos_ids:
            return "stop"
        if self.matcher is not None and token not in self.end_ids:
            self.matcher.consume(token)
        if token in self.request.sampling.stop_token_ids:
            self.stop_token = token
            return "stop"
        if self._stops is not None and self._completes_stop(self._stops, token):
            return "stop"
        if self.undecided:
            return None
        return "length" if len(self.tokens) >= self.max_total else None

    @property
    def undecided(self) -> bool:
        """Whether only the grammar can end the choice: the request has no end token.

        `decide` then returns the finish reason, once the state of the matcher is known.
        """
        return self.matcher is not None and not self.end_ids and self.generated > 0

    def decide(self) -> Finish | None:
        """Return the finish reason of an undecided choice after its last token, or None."""
        if self.matcher is not None and self.matcher.complete:
            return "stop"
        return "length" if len(self.tokens) >= self.max_total else None

    def _completes_stop(self, stops: StopMatcher, token: int) -> bool:
        """Return whether a stop string ends with this token. Before min_tokens it never does."""
        if self._vocabulary.special(token) in self.request.sampling.stop:
            match: StopMatch | None = StopMatch(self._vocabulary.special(token) or "", 1)
        else:
            match = stops.feed(self._vocabulary.text(token))
        if match is not None and self.generated > self.request.sampling.min_tokens:
            self.stop_match = match
        return self.stop_match is not None

    def restart(self, experts: Tensor | None) -> None:
        """Reset what was computed under the previous weights, and keep what was sampled.

        `experts` are the routed experts of the computed tokens. They record how the tokens so far
        were sampled, so recomputing them under new weights must not change the record.
        """
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = [None]
        if experts is not None:
            self.old_experts = self.experts_with(experts)
        self.computed = 0

    def experts_with(self, rows: Tensor) -> Tensor:
        """Return `rows` with those recorded before a restart put back."""
        if self.old_experts is None:
            return rows.clone()
        return torch.cat((self.old_experts, rows[len(self.old_experts) :]))


class RequestHandle:
    """A request in flight: its choices, its completions so far, and the callback for its events."""

    def __init__(
        self, request: EngineRequest, deliver: Callable[[Event], None], *, stream: bool = False
    ) -> None:
        self.request = request
        self.deliver = deliver
        self.stream = stream
        self.grammar: GrammarProcess | None = None
        """The compiled grammar of the request, if it has one."""
        self.sequences: list[Sequence] = []
        self.completions: dict[int, Completion] = {}

    @property
    def ended(self) -> bool:
        """Whether all choices have ended, on their own or by an abort."""
        return bool(self.sequences) and all(s.finish is not None for s in self.sequences)
