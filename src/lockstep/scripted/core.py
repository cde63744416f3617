"""The engine of a scripted worker: a script decides the tokens, hashes give their logprobs.

Requests, streams, pauses, aborts, weights and versions are those of the embedded engine; only the
model is missing. Only the digest of the weights is used, so an update changes every logprob, and a
prompt of 128,000 tokens takes milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.engine import Engine, EngineOptions, EngineRequest, ModelConfig
from lockstep.engine.core import Core
from lockstep.engine.model.lora import Adapter
from lockstep.engine.numerics.plan import plan
from lockstep.engine.sampler import uniform
from lockstep.engine.scheduler import Scheduler
from lockstep.engine.sequence import RequestHandle, Sequence
from lockstep.engine.weights.served import ServedWeights
from lockstep.engine.weights.weights import Weights
from lockstep.models import bundled
from lockstep.scripted.distribution import HashedDistribution
from lockstep.scripted.responder import Responder, ScriptedReply
from lockstep.scripted.script import Script
from lockstep.tokens import PromptLogprob
from lockstep.tokens.errors import BadRequest, UnknownModel

CONTEXT = 131_072
"""Default context length, in tokens of prompt and completion."""
NAP_SECONDS = 0.01
"""Longest sleep between two steps while every sequence waits, so that commands run soon."""
REASON = "a scripted worker has no model: its logprobs are hashes of the tokens before"


@dataclass(slots=True)
class _Speech:
    """The remaining reply of a sequence: its state in the distribution, and when a token is due."""

    reply: ScriptedReply
    state: int
    due: float


class _NoPrefixes:
    """A prefix cache that stores nothing, because nothing is expensive to compute."""

    hits = queries = 0

    def __len__(self) -> int:
        return 0

    def clear(self) -> None:
        """Do nothing: the cache is always empty."""

    def store(self, root: bytes, tokens: list[int], slot: int) -> None:
        """Do nothing: no keys or values were computed."""


class _NoKeys:
    is_cuda = False


class _NoCache:
    """Stand-in for the cache of keys, values and routed experts."""

    k = _NoKeys()
    experts = None


class ScriptedCore(Core):
    """A Core whose tokens come from a script. `directory` holds a tokenizer, and perhaps weights.

    Without weights it serves those of the bundled model, of which only the digest matters.
    Temperature and similar options have no effect: tokens are scored by the distribution of the
    script.
    """

    def __init__(self, directory: Path, options: EngineOptions, script: Script) -> None:
        if not (directory / "tokenizer.json").is_file():
            raise UnknownModel(f"{directory} has no tokenizer.json", param="model")
        self._responder = Responder(script, directory)
        self._replies: dict[RequestHandle, ScriptedReply] = {}
        self._speeches: dict[Sequence, _Speech] = {}
        super().__init__(directory, options)

    def _read_config(self, directory: Path) -> ModelConfig:
        """Return the config of the weights, with the vocabulary of the tokenizer."""
        own = any(directory.glob("*.safetensors")) and (directory / "config.json").is_file()
        self._weights = directory if own else bundled("tiny") or directory
        config = ModelConfig.read(self._weights)
        renderer = self._responder.renderer
        return replace(
            config,
            vocab_size=config.vocab_size if own else len(renderer.tokenizer),
            eos_ids=frozenset(renderer.stop_token_ids),
            moe_layers=(),
        )

    def _load(self, directory: Path) -> None:
        """Load the weights, for their digest only, and a distribution instead of a model."""
        options = self.options
        self.max_len = options.max_model_len or CONTEXT
        self.served = ServedWeights(self._weights, ModelConfig.read(self._weights), options)
        self.arithmetic_note = REASON
        self.plan = plan("close", device="cpu", dtype=options.dtype, rows=0, reason=REASON)
        self.cache = _NoCache()  # type: ignore[assignment]
        self.prefixes = _NoPrefixes()  # type: ignore[assignment]
        self.scheduler = Scheduler(options.max_seqs, options.max_batch_tokens, _no_move)
        self._distribution = HashedDistribution(self.config.vocab_size)

    @property
    def scores_beside(self) -> bool:
        return False

    def check(self, request: EngineRequest) -> None:
        """Raise what `Core.check` raises, or the error that the script defines for this request."""
        super().check(request)
        at, rule = self._responder.find(request.prompt_ids)
        if rule.error is not None and not rule.error.after_tokens:
            self._responder.count(at)
            raise rule.error.error()

    def submit(self, handle: RequestHandle) -> None:
        super().submit(handle)
        self._replies[handle] = self._responder.take(handle.request.prompt_ids)

    def score_all(
        self,
        sequences: list[list[int]],
        *,
        adapter: str | None = None,
        weights: Weights | None = None,
    ) -> list[list[float]]:
        """Return the logprobs of every token after the first, under the sampled distribution."""
        self.check_scorable(sequences)
        loaded = None if adapter is None else self.served.adapter(adapter)
        opening = self._start(weights or self.served.weights, loaded)
        return [
            self._distribution.logprobs(self._distribution.after(opening, ids[:1]), ids[1:])
            for ids in sequences
        ]

    def _step(self) -> None:
        self._admit()
        now = time.monotonic()
        running = self.scheduler.running
        due = [sequence for sequence in running if self._speeches[sequence].due <= now]
        if not due:
            waits = [self._speeches[sequence].due - now for sequence in running]
            time.sleep(min([*waits, NAP_SECONDS]))
            return
        self.steps += 1
        for sequence in due:
            if sequence in self.handles:
                self._speak(sequence)
        self._check_drained()

    def _speak(self, sequence: Sequence) -> None:
        """Emit one token of a sequence, or the error that the script defines after the last."""
        if sequence.undecided and (finish := sequence.decide()):
            self._finish(sequence, finish)
            return
        speech, sampling = self._speeches[sequence], sequence.request.sampling
        rule, position = speech.reply.rule, sequence.generated
        if rule.error is not None and position >= rule.error.after_tokens:
            self._fail(self.handles[sequence], rule.error.error())
            return
        scripted = speech.reply.token_ids
        banned = sequence.end_ids if position < sampling.min_tokens else ()
        if position < len(scripted) and scripted[position] not in banned:
            token = scripted[position]
        else:  # the reply has ended, but the request must not end yet
            number = uniform(sequence.seed, position)
            token = self._distribution.draw(speech.state, number, banned)
        # A script may contradict the request: fail loudly instead of returning a disallowed token.
        if (why := _why_forbidden(sequence, token)) is not None:
            error = BadRequest(f"the script says token {token} at position {position}, {why}")
            self._fail(self.handles[sequence], error)
            return
        sampled_token = self._distribution.score_token(speech.state, token, sampling.logprobs)
        speech.state = self._distribution.after(speech.state, (token,))
        speech.due = time.monotonic() + rule.token_delay
        self.take(sequence, sampled_token)
        sequence.computed = len(sequence.tokens) - 1

    def _load_prefix(self, sequence: Sequence, slot: int) -> None:
        """Prepare the reply of a sequence, at its start or again under new weights."""
        reply = self._replies[self.handles[sequence]]
        earlier = self._speeches.get(sequence)
        opening = self._start(self.served.weights, sequence.adapter)
        # A root marks the request as started; computed tokens let its later choices start.
        sequence.root = b"scripted"
        sequence.computed = sequence.prompt_len
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs = [None, *self._prompt_logprobs(sequence, opening)]
        # The reply has no end token, so the sequence is cut at its length.
        if reply.rule.finish == "length":
            end = sequence.prompt_len + max(1, len(reply.token_ids))
            sequence.max_total = min(sequence.max_total, end)
        self._speeches[sequence] = _Speech(
            reply,
            self._distribution.after(opening, sequence.tokens),
            earlier.due if earlier is not None else time.monotonic() + reply.rule.delay,
        )

    def _prompt_logprobs(self, sequence: Sequence, opening: int) -> list[PromptLogprob]:
        count = sequence.request.sampling.prompt_logprobs or 0
        first, *rest = sequence.request.prompt_ids
        state, scored = self._distribution.after(opening, (first,)), []
        for token in rest:
            sampled_token = self._distribution.score_token(state, token, count)
            scored.append(
                PromptLogprob(token, sampled_token.logprob, sampled_token.rank, sampled_token.top)
            )
            state = self._distribution.after(state, (token,))
        return scored

    def _leave(self, sequence: Sequence) -> None:
        self._speeches.pop(sequence, None)
        super()._leave(sequence)
        live = set(self.handles.values())
        self._replies = {handle: reply for handle, reply in self._replies.items() if handle in live}

    def _start(self, weights: Weights, adapter: Adapter | None) -> int:
        name = weights.digest or f"{weights.version}.{weights.epoch}"
        return self._distribution.start(name if adapter is None else f"{name}|{adapter.label}")


def scripted_engine(path: Path) -> Callable[[str, EngineOptions], Engine]:
    """Return a factory of scripted engines. Raises BadRequest for an unreadable script."""
    script = Script.read(path)

    def make_core(directory: Path, options: EngineOptions) -> Core:
        return ScriptedCore(directory, options, script)

    return lambda model, options: Engine(model, options, make_core=make_core)


def _why_forbidden(sequence: Sequence, token: int) -> str | None:
    """Return why the request does not allow this token next, or None if it does."""
    allowed = sequence.request.sampling.allowed_token_ids
    if allowed is not None and token not in allowed:
        return "which is not in allowed_token_ids"
    if sequence.matcher is not None and not sequence.matcher.mask(sequence.end_ids)[token]:
        return "which does not fit the grammar of the request"
    return None


def _no_move(source: int, target: int, length: int) -> None:
    """Do nothing: a slot holds nothing to move."""
