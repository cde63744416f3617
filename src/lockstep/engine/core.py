"""The engine without its thread: requests in, one step at a time, pieces and completions out.

Everything here runs in one thread, between or within steps, so nothing needs a lock: a swap of
weights, an adapter or a pause always falls between two tokens.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.kv.cache import PrefixCache, SlotCache, root_name
from lockstep.engine.model.model import Model, Segment
from lockstep.engine.numerics.invariance import fitting, settle
from lockstep.engine.numerics.plan import plan, prepare_process
from lockstep.engine.record import completion, experts_of
from lockstep.engine.request_handle import RequestHandle
from lockstep.engine.sampler import Sampled, SamplingRow, sample, score, top_logprobs, uniform
from lockstep.engine.scheduler import Scheduler, Work
from lockstep.engine.scoring import logprobs_of, score_sequences
from lockstep.engine.sequence import EngineRequest, Sequence, StreamedToken
from lockstep.engine.weights.served import ServedWeights
from lockstep.engine.weights.weights import Weights
from lockstep.tokens import Finish, PromptLogprob, Sampling
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import (
    BadLogprob,
    BadRequest,
    Conflict,
    LockstepError,
    PromptTooLong,
)
from lockstep.tokens.ids import check_ids

if TYPE_CHECKING:
    from lockstep.engine.cuda.overlapped import OverlappedDecoder

log = logging.getLogger(__name__)
PauseMode = Literal["abort", "wait", "keep"]
State = Literal["running", "draining", "paused"]


class Core:
    """Model, caches, scheduler and all engine state; see the module's first lines."""

    def __init__(self, directory: Path, options: EngineOptions) -> None:
        self.options = options
        self.config = ModelConfig.read(directory)
        self.max_len = options.max_model_len or self.config.max_position
        if not 2 <= self.max_len <= self.config.max_position:
            raise BadRequest(
                f"max_model_len is {self.max_len}, expected 2 to {self.config.max_position}, the "
                "length this model was made for",
                param="max_model_len",
            )
        prepare_process(options)
        self.policy = ServedWeights(directory, self.config, options)
        self.model = Model(self.config, self.max_len, options.device, self.policy.dtype)
        self.model.arithmetic, self.arithmetic_note = fitting(self.config, options, self.max_len)
        capacity = self.model.arithmetic.keys(self.max_len)
        self.cache = SlotCache(self.config, options, capacity, self.policy.dtype)
        settled = settle(self.model, self.policy.weights, self.cache, options)
        self.arithmetic_note = self.arithmetic_note or settled
        self.plan = plan(
            self.model.arithmetic.name,
            device=options.device,
            dtype=options.dtype,
            rows=self.model.rows,
            reason=self.arithmetic_note,
        )
        self.prefixes = PrefixCache(self.cache, options.prefix_cache_bytes)
        budget = max(options.max_batch_tokens, self.cache.slots + 1)
        self.scheduler = Scheduler(self.cache.slots, budget, self._move)
        # Where the last layer has experts, every token goes through it: its routing is recorded.
        self._routes_last = self.config.layers - 1 in self.config.moe_layers
        self.tickets: dict[Sequence, RequestHandle] = {}
        self.state: State = "running"
        self.ahead = self._decoder_ahead()
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self._drained: list[Callable[[LockstepError | None], None]] = []

    def commit(self, weights: Weights) -> None:
        """Serves `weights` from the next token on; requests in flight go on under them."""
        self._land()
        self.policy.commit(weights)
        self._restart_running()

    def rollback(self) -> None:
        """Serves the weights before the last commit again. Raises Conflict when there are none."""
        self._land()
        self.policy.rollback()
        self._restart_running()

    # Requests

    def submit(self, ticket: RequestHandle) -> None:
        """Queues a request. Raises what `check` raises, and then keeps nothing of it."""
        request = ticket.request
        self.check(request)
        seed = request.sampling.seed
        base = secrets.randbits(64) if seed is None else seed
        leader: Sequence | None = None
        for index in range(request.sampling.n):
            sequence = Sequence(request, index, base + index, self.max_len, leader)
            leader = leader or sequence
            ticket.sequences.append(sequence)
            self.tickets[sequence] = ticket
            self.scheduler.add(sequence)

    def check(self, request: EngineRequest) -> None:
        """Raises the error that says why this request can never run here."""
        check_ids(request.prompt_ids, self.config.vocab_size)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if ids := getattr(request.sampling, name):
                check_ids(list(ids), self.config.vocab_size, name)
        if len(request.prompt_ids) >= self.max_len:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens, but max_model_len is "
                f"{self.max_len} and at least one token must be generated",
                param="token_ids",
            )
        start = request.experts_start
        if start is not None and (start < 0 or not self.config.moe_layers):
            reason = f"{start} is negative" if start < 0 else "but this model has none"
            raise BadRequest(
                f"routed experts were asked for, {reason}", param="routed_experts_prompt_start"
            )
        options = request.sampling
        allowed = options.allowed_token_ids
        if options.min_tokens and allowed and set(allowed) <= set(self._ends(options)):
            raise BadRequest(
                "allowed_token_ids leaves only ends, but min_tokens forbids to end at once",
                param="min_tokens",
            )
        self.policy.check_served(request)

    def abort(self, request_id: str) -> int:
        """Ends the requests of that id with what they have; returns how many there were."""
        self._land()
        found = {t for t in self.tickets.values() if t.request.request_id == request_id}
        for ticket in found:
            for sequence in ticket.sequences:
                self._finish(sequence, "abort")
        self._check_drained()
        return len(found)

    def drop(self, ticket: RequestHandle) -> None:
        """Forgets a request that nobody waits for any more."""
        self._land()
        self._forget(ticket)

    def _forget(self, ticket: RequestHandle) -> None:
        for sequence in ticket.sequences:
            if self.tickets.pop(sequence, None) is not None:
                self._leave(sequence)
        self._check_drained()

    def fail_all(self, error: LockstepError) -> None:
        """Answers every request with an error."""
        for ticket in dict.fromkeys(self.tickets.values()):
            self._fail(ticket, error)

    # Pausing

    def pause(self, mode: PauseMode, done: Callable[[LockstepError | None], None]) -> None:
        """Stops generating; calls `done` when the engine is quiet (or resumed before it was)."""
        self._land()
        if mode == "abort":
            for sequence in [*self.scheduler.waiting, *reversed(self.scheduler.running)]:
                self._finish(sequence, "abort")
        if mode == "wait":
            self.state = "draining"
            self._drained.append(done)
            self._check_drained()
        else:
            self.state = "paused"
            self._end_drain(
                None if mode == "abort" else Conflict("paused with mode keep meanwhile")
            )
            done(None)

    def resume(self) -> None:
        self.state = "running"
        self._end_drain(Conflict("resumed before all requests had ended"))

    # Stepping

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self.state == "paused":
            return False
        waiting = self.scheduler.has_waiting and self.state == "running"
        return bool(self.scheduler.running) or waiting or self._drains_more

    def step(self) -> None:
        """Computes one batch: every decoding sequence gets a token, prefills get on."""
        with torch.inference_mode():
            self._step()

    def _step(self) -> None:
        if self.ahead is not None and self.ahead.airborne:
            self.ahead.advance()
            self.steps += self.ahead.airborne
            self._check_drained()
            return
        self._admit()
        works = self.scheduler.plan()
        if not works:
            return
        self.steps += 1
        if self.ahead is not None and self.ahead.fits(works):
            self.ahead.launch(self.policy.weights, works)
            return
        segments = [self._segment(work) for work in works]
        hidden = self.model.forward(self.policy.weights, self.cache, self.model.batch(segments))
        ends = list(accumulate(segment.outputs for segment in segments))
        broken = self._broken(works, hidden, ends)
        sampling, rows = [], []
        for work, end in zip(works, ends, strict=True):
            if work.sequence.wants_prompt_logprobs:
                self._score_prompt(work, hidden, end - work.count)
            if work.samples:
                sampling.append(work)
                rows.append(end - 1)
        for work in works:
            work.sequence.computed += 0 if work in broken else work.count
        for work in broken:
            self._fail_broken(work.sequence)
        if sampling:
            self._sample(sampling, hidden, rows)
        self._check_drained()

    def score(
        self, token_ids: list[int], *, adapter: str | None = None, weights: Weights | None = None
    ) -> list[float]:
        """Logprobs of every token after the first, paused or not, without touching any request."""
        return self.score_all([token_ids], adapter=adapter, weights=weights)[0]

    def score_all(
        self,
        sequences: list[list[int]],
        *,
        adapter: str | None = None,
        weights: Weights | None = None,
    ) -> list[list[float]]:
        """`score` for several sequences, as many at once as slots are free."""
        self.check_scored(sequences)
        found = None if adapter is None else self.policy.adapter(adapter)
        free = range(len(self.scheduler.running), self.cache.slots + 1)
        with torch.inference_mode():
            return score_sequences(
                self.model,
                weights or self.policy.weights,
                self.cache,
                sequences,
                adapter=found,
                free=free,
                budget=self.options.max_batch_tokens,
            )

    def check_scored(self, sequences: list[list[int]]) -> None:
        """Raises the error that says why these can not be scored here."""
        for token_ids in sequences:
            check_ids(token_ids, self.config.vocab_size)
            if len(token_ids) > self.max_len:
                raise PromptTooLong(
                    f"{len(token_ids)} tokens were given to score, but max_model_len is "
                    f"{self.max_len}",
                    param="token_ids",
                )

    def _admit(self) -> None:
        begun_only = self.state == "draining"
        while self.state != "paused" and (sequence := self.scheduler.next_ready(begun_only)):
            request = sequence.request
            if sequence.begun and sequence.leader is not None:
                # It is part of a request in flight, and ends as the first choice would.
                sequence.adapter = sequence.leader.adapter
                if request.weight_version not in (None, self.policy.weights.version):
                    self._finish(sequence, "abort")
                    continue
            else:
                try:
                    self.policy.check_served(request)
                except LockstepError as error:
                    self._fail(self.tickets[sequence], error)
                    continue
                if request.adapter is not None:
                    sequence.adapter = self.policy.adapter(request.adapter)
            slot = self.scheduler.start(sequence)
            self.prompt_tokens += sequence.prompt_len if sequence.index == 0 else 0
            self._load_prefix(sequence, slot)

    def _load_prefix(self, sequence: Sequence, slot: int) -> None:
        adapter = None if sequence.adapter is None else sequence.adapter.uid
        sequence.root = root_name(self.policy.weights.epoch, adapter, sequence.request.cache_salt)
        if not sequence.wants_prompt_logprobs and not sequence.request.skip_prefix_cache:
            sequence.computed = self.prefixes.load(sequence.root, sequence.tokens, slot)

    def _broken(self, works: list[Work], hidden: Tensor, ends: list[int]) -> list[Work]:
        """Works whose states are not finite; their slots are wiped."""
        # A sum is finite only if all its terms are.
        if math.isfinite(hidden.sum().item()) and all(
            work.count == 1 or self._wrote_sound(work) for work in works
        ):
            return []
        broken = []
        for work, row, end in zip(works, [0, *ends], ends, strict=False):
            if not bool(torch.isfinite(hidden[row:end]).all()) or not self._wrote_sound(work):
                self.spoil(work.sequence)
                broken.append(work)
        return broken

    def spoil(self, sequence: Sequence) -> None:
        """Makes sure that nothing of what a broken sequence left in its slot is read again."""
        if sequence in self.scheduler.running:
            self.cache.wipe(self.scheduler.running.index(sequence))
            sequence.computed = 0

    def _wrote_sound(self, work: Work) -> bool:
        """Whether the states of its tokens up to the last layer are finite, asked for or not."""
        start = work.sequence.computed
        return self.cache.sound(work.slot, start, start + work.count)

    def _segment(self, work: Work) -> Segment:
        """Its tokens. Of those that are only read, no hidden state is asked for."""
        sequence, count = work.sequence, work.count
        tokens = sequence.tokens[sequence.computed : sequence.computed + count]
        every = count == 1 or sequence.wants_prompt_logprobs or self._routes_last
        outputs = count if every else int(work.samples)
        return Segment(work.slot, sequence.computed, tokens, outputs, sequence.adapter)

    def _score_prompt(self, work: Work, hidden: Tensor, row: int) -> None:
        sequence, options = work.sequence, work.sequence.request.sampling
        first = sequence.computed + 1
        targets = sequence.tokens[first : min(first + work.count, sequence.prompt_len)]
        if not targets or options.prompt_logprobs is None:
            return
        mode = options.logprob_mode or self.options.logprob_mode
        temperature = options.temperature if mode == "processed" else 1.0
        logprobs, ids = logprobs_of(
            self.model, self.policy.weights, hidden, row, targets, temperature or 1.0
        )
        chosen, ranks = score(logprobs, ids)
        tops = top_logprobs(logprobs, [options.prompt_logprobs] * len(targets))
        sequence.prompt_logprobs += [
            PromptLogprob(*fields)
            for fields in zip(targets, chosen.tolist(), ranks.tolist(), tops, strict=True)
        ]

    def _sample(self, works: list[Work], hidden: Tensor, rows: list[int]) -> None:
        logits = self.model.logits(self.policy.weights, hidden, rows)
        plans = [self._row(work.sequence) for work in works]
        for work, sampled in zip(works, sample(logits, plans), strict=True):
            sequence = work.sequence
            if sequence.generated == 0 and sequence in self.tickets:
                # Later choices of the request, and the next turn, start from here.
                self.prefixes.store(sequence.root, sequence.tokens, work.slot)
            self.take(sequence, sampled)

    def take(self, sequence: Sequence, sampled: Sampled) -> None:
        """A token that came for a sequence, if anybody still waits for it."""
        ticket = self.tickets.get(sequence)
        if ticket is None:
            return
        if not usable(sampled.logprob):
            self._fail_broken(sequence, sampled.logprob)
            return
        self.generated_tokens += 1
        sequence.append(sampled, self.policy.version_of(sequence.adapter))
        if finish := self._ended(sequence):
            self._finish(sequence, finish, sampled)
        elif ticket.stream:
            ticket.deliver(StreamedToken(sequence.index, sampled))

    def _row(self, sequence: Sequence) -> SamplingRow:
        options = sequence.request.sampling
        banned: tuple[int, ...] = ()
        if sequence.generated < options.min_tokens:
            banned = self._ends(options)
        return SamplingRow(
            options,
            options.logprob_mode or self.options.logprob_mode,
            uniform(sequence.seed, sequence.generated),
            banned,
        )

    # Endings

    def _ends(self, options: Sampling) -> tuple[int, ...]:
        return (*options.stop_token_ids, *(() if options.ignore_eos else self.config.eos_ids))

    def _ended(self, sequence: Sequence) -> Finish | None:
        """Why the token that just came is the last one, if it is."""
        options, token = sequence.request.sampling, sequence.tokens[-1]
        if token in self.config.eos_ids and not options.ignore_eos:
            return "stop"
        if token in options.stop_token_ids:
            sequence.stop_token = token
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.max_total else None

    def _finish(self, sequence: Sequence, finish: Finish, last: Sampled | None = None) -> None:
        """Ends a sequence that is still here; `last` is a token that was not delivered yet."""
        ticket = self.tickets.pop(sequence, None)
        if ticket is None:
            return
        sequence.finish = finish
        experts = None
        if self.cache.experts is not None and sequence in self.scheduler.running:
            slot = self.scheduler.running.index(sequence)
            experts = experts_of(sequence, self.cache.experts[slot, : sequence.computed])
        self._leave(sequence)
        done = completion(sequence, finish, experts, self.options)
        ticket.completions[sequence.index] = done
        if ticket.stream:
            ticket.deliver(StreamedToken(sequence.index, last, done))
        elif len(ticket.completions) == len(ticket.sequences):
            ticket.deliver([ticket.completions[s.index] for s in ticket.sequences])

    def _fail(self, ticket: RequestHandle, error: LockstepError) -> None:
        self._forget(ticket)
        ticket.deliver(error)

    def _fail_broken(self, sequence: Sequence, logprob: float = float("nan")) -> None:
        if ticket := self.tickets.get(sequence):
            error = BadLogprob(
                f"the model gave logprob {logprob} at position {sequence.generated} of choice "
                f"{sequence.index} under version {self.policy.weights.version!r}"
            )
            self._fail(ticket, error)

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self.scheduler.running:
            slot = self.scheduler.running.index(sequence)
            self.prefixes.store(sequence.root, sequence.tokens[: sequence.computed], slot)
        self.scheduler.remove(sequence)

    # Helpers that keep the parts in step with each other

    def _restart_running(self) -> None:
        for slot, sequence in list(enumerate(self.scheduler.running)):
            rows = self.cache.experts
            wanted = rows is not None and sequence.request.experts_start is not None
            sequence.restart(
                rows[slot, : sequence.computed] if wanted and rows is not None else None
            )
            self._load_prefix(sequence, slot)
        for sequence in list(self.scheduler.running):
            if sequence.request.weight_version not in (None, self.policy.weights.version):
                self._finish(sequence, "abort")

    def _land(self) -> None:
        """Hands on the tokens of a step that is still under way: what follows must know them."""
        if self.ahead is not None:
            self.ahead.land()

    def _decoder_ahead(self) -> OverlappedDecoder | None:
        """One step ahead of the host where there are kernels for it; they need Triton."""
        if not self.cache.k.is_cuda or find_spec("triton") is None:
            return None
        from lockstep.engine.cuda.graphs import Decoder
        from lockstep.engine.cuda.overlapped import OverlappedDecoder

        if not Decoder.able(self.model, self.cache):
            return None
        decoder = Decoder(self.model, self.cache)
        return OverlappedDecoder(
            decoder, self.scheduler, self.options.logprob_mode, self.take, self.spoil
        )

    def _move(self, source: int, target: int, sequence: Sequence) -> None:
        self.cache.move(source, target, sequence.computed)

    @property
    def _drains_more(self) -> bool:
        """Whether a request that is in flight still has choices to start before a pause."""
        return self.state == "draining" and any(s.begun for s in self.scheduler.waiting)

    def _end_drain(self, error: LockstepError | None) -> None:
        waiters, self._drained = self._drained, []
        for done in waiters:
            done(error)

    def _check_drained(self) -> None:
        if self.state == "draining" and not self.scheduler.running and not self._drains_more:
            self.state = "paused"
            self._end_drain(None)
