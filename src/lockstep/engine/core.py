"""The engine without its thread: requests in, one step at a time, pieces and completions out.

Everything here runs in one thread, between or within steps, so nothing needs a lock: a swap of
weights, an adapter or a pause always falls between two tokens.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lockstep.engine.arithmetic import Arithmetic, Close, Exact
from lockstep.engine.cache import PrefixCache, SlotCache, root_name
from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.model import Model, Segment
from lockstep.engine.policy import Policy
from lockstep.engine.sampler import Row, Sampled, sample, score, top_logprobs, uniform
from lockstep.engine.scheduler import Scheduler, Work
from lockstep.engine.scoring import logprobs_of, score_sequences
from lockstep.engine.selftest import self_test
from lockstep.engine.sequence import Piece, Request, Sequence
from lockstep.engine.weights import Weights
from lockstep.tokens import (
    Completion,
    Finish,
    PromptLogprob,
    RoutedExperts,
    Sampling,
    merge_spans,
)
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import (
    BadLogprob,
    BadRequest,
    Conflict,
    EngineFailure,
    LockstepError,
    PromptTooLong,
)
from lockstep.wire.strict import check_ids

log = logging.getLogger(__name__)
PauseMode = Literal["abort", "wait", "keep"]
State = Literal["running", "draining", "paused"]
Event = Piece | list[Completion] | LockstepError


class Ticket:
    """A request on its way: its sequences, and where its events go (`deliver`)."""

    def __init__(
        self, request: Request, deliver: Callable[[Event], None], *, stream: bool = False
    ) -> None:
        self.request = request
        self.deliver = deliver
        self.stream = stream
        self.sequences: list[Sequence] = []
        self.completions: dict[int, Completion] = {}


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
        self.policy = Policy(directory, self.config, options)
        self.model = Model(self.config, Close(), self.max_len, options.device)
        self.cache = SlotCache(self.config, options, self.max_len, self.policy.dtype)
        self.arithmetic_note = ""
        self.model.arithmetic = self._choose_arithmetic()
        self.prefixes = PrefixCache(self.cache, options.prefix_cache_bytes)
        budget = max(options.max_batch_tokens, self.cache.slots + 1)
        self.scheduler = Scheduler(self.cache.slots, budget, self._move)
        self.tickets: dict[Sequence, Ticket] = {}
        self.state: State = "running"
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self._drained: list[Callable[[LockstepError | None], None]] = []

    def commit(self, weights: Weights) -> None:
        """Serves `weights` from the next token on; requests in flight go on under them."""
        self.policy.commit(weights)
        self._restart_running()

    def rollback(self) -> None:
        """Serves the weights before the last commit again. Raises Conflict when there are none."""
        self.policy.rollback()
        self._restart_running()

    # Requests

    def submit(self, ticket: Ticket) -> None:
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

    def check(self, request: Request) -> None:
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
        found = {t for t in self.tickets.values() if t.request.request_id == request_id}
        for ticket in found:
            for sequence in ticket.sequences:
                self._finish(sequence, "abort")
        self._check_drained()
        return len(found)

    def drop(self, ticket: Ticket) -> None:
        """Forgets a request that nobody waits for any more."""
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
        self._admit()
        works = self.scheduler.plan()
        if not works:
            return
        self.steps += 1
        batch = self.model.batch([self._segment(work) for work in works])
        hidden = self.model.forward(self.policy.weights, self.cache, batch)
        broken = self._broken(works, hidden)
        row, sampling = 0, []
        for work in works:
            if work.sequence.wants_prompt_logprobs:
                self._score_prompt(work, hidden, row)
            row += work.count
            if work.samples:
                sampling.append((work, row - 1))
        for work in works:
            work.sequence.computed += 0 if work in broken else work.count
        for work in broken:
            self._fail_broken(work.sequence)
        if sampling:
            rows = torch.tensor([at for _, at in sampling], device=hidden.device)
            self._sample([work for work, _ in sampling], hidden, rows)
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
        for token_ids in sequences:
            check_ids(token_ids, self.config.vocab_size)
            if len(token_ids) > self.max_len:
                raise PromptTooLong(
                    f"{len(token_ids)} tokens were given to score, but max_model_len is "
                    f"{self.max_len}",
                    param="token_ids",
                )
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

    def _broken(self, works: list[Work], hidden: Tensor) -> list[Work]:
        """Works whose states are not finite; what they wrote to their slots is wiped."""
        if bool(torch.isfinite(hidden[: sum(work.count for work in works)]).all()):
            return []
        broken, row = [], 0
        for work in works:
            if not bool(torch.isfinite(hidden[row : row + work.count]).all()):
                start = work.sequence.computed
                self.cache.wipe(work.slot, start, start + work.count)
                broken.append(work)
            row += work.count
        return broken

    def _segment(self, work: Work) -> Segment:
        sequence = work.sequence
        tokens = sequence.tokens[sequence.computed : sequence.computed + work.count]
        return Segment(work.slot, sequence.computed, tokens, sequence.adapter)

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

    def _sample(self, works: list[Work], hidden: Tensor, rows: Tensor) -> None:
        logits = self.model.logits(self.policy.weights, hidden, rows)
        plans = [self._row(work.sequence) for work in works]
        for work, sampled in zip(works, sample(logits, plans), strict=True):
            sequence = work.sequence
            ticket = self.tickets.get(sequence)
            if ticket is None:
                continue  # another choice of the same request failed in this step
            if sequence.generated == 0:
                # Later choices of the request, and the next turn, start from here.
                self.prefixes.store(sequence.root, sequence.tokens, work.slot)
            if not usable(sampled.logprob):
                self._fail_broken(sequence, sampled.logprob)
                continue
            self.generated_tokens += 1
            sequence.append(sampled, self.policy.version_of(sequence.adapter))
            if finish := self._ended(sequence):
                self._finish(sequence, finish, sampled)
            elif ticket.stream:
                ticket.deliver(Piece(sequence.index, sampled))

    def _row(self, sequence: Sequence) -> Row:
        options = sequence.request.sampling
        banned: tuple[int, ...] = ()
        if sequence.generated < options.min_tokens:
            banned = self._ends(options)
        return Row(
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
        experts = self._experts(sequence)
        self._leave(sequence)
        done = self._completion(sequence, finish, experts)
        ticket.completions[sequence.index] = done
        if ticket.stream:
            ticket.deliver(Piece(sequence.index, last, done))
        elif len(ticket.completions) == len(ticket.sequences):
            ticket.deliver([ticket.completions[s.index] for s in ticket.sequences])

    def _fail(self, ticket: Ticket, error: LockstepError) -> None:
        self.drop(ticket)
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

    def _completion(
        self, sequence: Sequence, finish: Finish, experts: RoutedExperts | None
    ) -> Completion:
        options = sequence.request.sampling
        return Completion(
            token_ids=sequence.output_ids,
            logprobs=sequence.logprobs,
            prompt_ids=sequence.request.prompt_ids,
            finish=finish,
            versions=merge_spans(sequence.versions),
            logprob_mode=options.logprob_mode or self.options.logprob_mode,
            temperature=options.temperature,
            index=sequence.index,
            request_id=sequence.request.request_id,
            stop_token=sequence.stop_token,
            top_logprobs=sequence.tops if options.logprobs else None,
            ranks=sequence.ranks,
            prompt_logprobs=self._prompt_logprobs(sequence),
            worker=self.options.worker,
            adapter=sequence.request.adapter,
            experts=experts,
        )

    def _prompt_logprobs(self, sequence: Sequence) -> list[PromptLogprob | None] | None:
        """Those of the first choice, which all share; None unless the whole prompt was scored."""
        scored = (sequence.leader or sequence).prompt_logprobs
        asked = sequence.request.sampling.prompt_logprobs is not None
        return scored if asked and len(scored) == sequence.prompt_len else None

    def _experts(self, sequence: Sequence) -> RoutedExperts | None:
        """The rows asked for; None when the sequence ended before all of them were computed."""
        start, last = sequence.request.experts_start, len(sequence.tokens) - 1
        if start is None or self.cache.experts is None or sequence not in self.scheduler.running:
            return None
        slot = self.scheduler.running.index(sequence)
        rows = sequence.experts_with(self.cache.experts[slot, : sequence.computed])
        if len(rows) < last:
            return None
        array = rows[start:last].cpu().contiguous().numpy()
        dtype = "uint8" if self.cache.experts.dtype == torch.uint8 else "uint16"
        return RoutedExperts(array.tobytes(), array.shape, dtype, start)

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

    def _choose_arithmetic(self) -> Arithmetic:
        asked = self.options.arithmetic
        if asked == "close":
            self.arithmetic_note = "close was asked for"
        elif self.options.device != "cpu" or self.options.dtype != "float32":
            self.arithmetic_note = (
                f"exact needs fp32 on a CPU, not {self.options.dtype} on {self.options.device}"
            )
        else:
            self.model.arithmetic = Exact()
            problem = self_test(self.model, self.policy.weights, self.cache)
            if problem is None:
                return self.model.arithmetic
            if asked == "exact":
                raise EngineFailure(f"exact arithmetic does not hold on this CPU: {problem}")
            self.arithmetic_note = f"the self-test failed: {problem}"
            log.warning("falling back to close arithmetic: %s", problem)
        return Close()
