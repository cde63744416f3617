"""A request and its sequences: what was asked, and how far each choice has come."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.engine.model.lora import Adapter
from lockstep.engine.sampler import Sampled
from lockstep.tokens import Completion, Finish, PromptLogprob, Ranked, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request to the engine. A lower `priority` is served sooner.

    `experts_start` asks for routed experts from that row on. `weight_version` demands that every
    token is sampled under exactly that version, `min_weight_version` that the version has been
    committed here, now or before.
    """

    prompt_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    request_id: str = ""
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    experts_start: int | None = None
    weight_version: str | None = None
    min_weight_version: str | None = None
    skip_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """What came of one choice in one step: a token, its completion when it ended, or both."""

    index: int
    sampled: Sampled | None
    completion: Completion | None = None


class Sequence:
    """One choice of a request. `tokens` holds prompt and output, `computed` how many are cached."""

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        seed: int,
        max_len: int,
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
        self.adapter: Adapter | None = None
        self.root = b""
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.tops: list[tuple[Ranked, ...]] = []
        self.versions: list[str] = []
        self.prompt_logprobs: list[PromptLogprob | None] = [None]
        self.old_experts: Tensor | None = None
        self.finish: Finish | None = None
        self.stop_token: int | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values must still be computed before the next one is sampled."""
        return len(self.tokens) - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        asked = self.request.sampling.prompt_logprobs is not None and self.leader is None
        return asked and len(self.prompt_logprobs) < self.prompt_len

    @property
    def ready(self) -> bool:
        """Whether it may be admitted: later choices wait for the first, to share its prefix."""
        leader = self.leader
        return leader is None or leader.finish is not None or leader.computed >= self.prompt_len

    @property
    def begun(self) -> bool:
        """Whether its request is in flight, even if this choice still waits."""
        return bool((self.leader or self).root)

    def append(self, sampled: Sampled, version: str) -> None:
        self.tokens.append(sampled.token_id)
        self.logprobs.append(sampled.logprob)
        self.ranks.append(sampled.rank)
        self.tops.append(sampled.top)
        self.versions.append(version)

    def restart(self, experts: Tensor | None) -> None:
        """Forgets what was computed under weights that are gone, and keeps what was sampled.

        `experts` are the routed experts of the computed tokens: those rows say how the tokens so
        far were made, and computing them again must not change the record.
        """
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = [None]
        if experts is not None:
            self.old_experts = self.experts_with(experts)
        self.computed = 0

    def experts_with(self, rows: Tensor) -> Tensor:
        """`rows`, with those that were recorded before a restart as they were then."""
        if self.old_experts is None:
            return rows.clone()
        return torch.cat((self.old_experts, rows[len(self.old_experts) :]))
