"""The engine without its thread: accept requests, run steps, deliver tokens and completions.

All code here runs in one thread, between or within steps, so it needs no locks. A weight swap, an
adapter change or a pause always happens between two tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.cache import PrefixCache, SlotCache, root_name
from lockstep.engine.model.model import Model
from lockstep.engine.model_runner import ModelRunner
from lockstep.engine.numerics.invariance import prove, requested_arithmetic
from lockstep.engine.numerics.plan import plan, prepare_process
from lockstep.engine.options import EngineOptions
from lockstep.engine.record import completion, experts_of
from lockstep.engine.sampler import Sampled
from lockstep.engine.scheduler import Scheduler
from lockstep.engine.scoring import score_sequences
from lockstep.engine.sequence import EngineRequest, RequestHandle, Sequence, StreamedToken
from lockstep.engine.text.grammar_process import GrammarMatcher, wait_for_masks
from lockstep.engine.text.grammars import Grammars
from lockstep.engine.text.vocabulary import Vocabulary
from lockstep.engine.weights.served import ServedWeights
from lockstep.engine.weights.weights import Weights
from lockstep.tokens import Finish
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import (
    BadLogprob,
    BadRequest,
    Conflict,
    LockstepError,
    PromptTooLong,
)
from lockstep.tokens.ids import check_ids
from lockstep.tokens.operation import PauseMode

if TYPE_CHECKING:
    from lockstep.engine.cuda.overlapped import OverlappedRunner

MASK_GRACE_SECONDS = 0.01
"""Longest that a step waits for a mask. A sequence whose mask takes longer misses steps."""
IDLE_WAIT_SECONDS = 0.05
"""Longest that the engine's thread waits for masks when nothing else can be computed."""
State = Literal["running", "draining", "paused"]


class Core:
    """The model, the caches, the scheduler and the state of every request of one engine."""

    def __init__(self, directory: Path, options: EngineOptions) -> None:
        self.options = options
        self.config = self._read_config(directory)
        self.vocabulary = Vocabulary(directory)
        self.grammars = Grammars(self.vocabulary, self.config.vocab_size)
        self.handles: dict[Sequence, RequestHandle] = {}
        self.state: State = "running"
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self._on_quiet: list[Callable[[LockstepError | None], None]] = []
        self._load(directory)
        self.overlapped = self._overlapped_runner()
        self.warm_note = self._warm()

    def _read_config(self, directory: Path) -> ModelConfig:
        return ModelConfig.read(directory)

    def _load(self, directory: Path) -> None:
        """Load the weights and create the model, the caches, the scheduler and the runner."""
        options = self.options
        self.max_len = options.max_model_len or self.config.max_position
        if not 2 <= self.max_len <= self.config.max_position:
            raise BadRequest(
                f"max_model_len is {self.max_len}, expected 2 to {self.config.max_position}, the "
                "length this model was made for",
                param="max_model_len",
            )
        prepare_process(options)
        self.served = ServedWeights(directory, self.config, options)
        self.model = Model(self.config, self.max_len, options.device, self.served.dtype)
        arithmetic, reason = requested_arithmetic(self.config, options, self.max_len)
        self.model.arithmetic = arithmetic
        capacity = self.model.arithmetic.keys(self.max_len)
        self.cache = SlotCache(self.config, options, capacity, self.served.dtype)
        self.arithmetic_note = reason or prove(self.model, self.served.weights, self.cache, options)
        self.plan = plan(
            self.model.arithmetic.name,
            device=options.device,
            dtype=options.dtype,
            rows=self.model.row_multiple,
            reason=self.arithmetic_note,
        )
        self.prefixes = PrefixCache(self.cache, options.prefix_cache_bytes)
        # With every slot decoding, at least one token of the budget is left for a prefill.
        budget = max(options.max_batch_tokens, self.cache.slots + 1)
        # Not a method of this object: in a cycle, a core that is no longer used would keep its
        # cache until the next garbage collection.
        self.scheduler = Scheduler(self.cache.slots, budget, self.cache.move)
        self.runner = ModelRunner(self.model, self.cache, options, self.grammars)

    def commit(self, weights: Weights) -> None:
        """Serve `weights` from the next token on. Requests in flight continue under them."""
        # The step in flight was computed by the old weights: its tokens get the old version.
        self._collect()
        self.served.commit(weights)
        self._restart_running()

    def rollback(self) -> None:
        """Serve the previous weights again. Raises Conflict when there are none."""
        self._collect()
        self.served.rollback()
        self._restart_running()

    # Requests

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request. Raises what `check` raises, before anything is queued."""
        request = handle.request
        self.check(request)
        seed = request.sampling.seed
        base = secrets.randbits(64) if seed is None else seed
        leader: Sequence | None = None
        for index in range(request.sampling.n):
            sequence = Sequence(
                request,
                index,
                base + index,
                self.max_len,
                self.config.eos_ids,
                self.vocabulary,
                self._matcher(handle),
                leader,
            )
            if request.earlier is not None:
                sequence.take_over(request.earlier)
            leader = leader or sequence
            handle.sequences.append(sequence)
            self.handles[sequence] = handle
            self.scheduler.add(sequence)

    def _matcher(self, handle: RequestHandle) -> GrammarMatcher | None:
        grammar = handle.request.sampling.grammar
        return None if grammar is None else self.grammars.matcher(grammar, handle.grammar)

    def check(self, request: EngineRequest) -> None:
        """Raise the error that says why this engine cannot run the request.

        The engine compiles its grammar before, in another thread.
        """
        request.check(self.config, self.max_len)
        if request.sampling.stop:
            self.vocabulary.load("stop")
        self.served.check_served(request)

    def abort(self, *request_ids: str) -> int:
        """End the requests with these ids, keeping their tokens; return how many there were."""
        self._collect()
        named = frozenset(request_ids)
        handles = {h for h in self.handles.values() if h.request.request_id in named}
        for handle in handles:
            for sequence in handle.sequences:
                self._finish(sequence, "abort")
        self._check_drained()
        return len(handles)

    def drop(self, handle: RequestHandle) -> None:
        """Remove a request whose caller no longer waits for it."""
        self._collect()
        self._forget(handle)

    def _forget(self, handle: RequestHandle) -> None:
        for sequence in handle.sequences:
            if self.handles.pop(sequence, None) is not None:
                self._leave(sequence)
        self._check_drained()

    def fail_all(self, error: LockstepError) -> None:
        """End every request with an error."""
        for handle in dict.fromkeys(self.handles.values()):
            self._fail(handle, error)

    # Pausing

    def pause(self, mode: PauseMode, on_quiet: Callable[[LockstepError | None], None]) -> None:
        """Stop generating, and call `on_quiet` once no request runs.

        `on_quiet` gets None, or the Conflict that ended a `wait` early.
        """
        self._collect()
        if mode == "abort":
            # The last slot first: removing from the end moves no other sequence.
            for sequence in [*self.scheduler.waiting, *reversed(self.scheduler.running)]:
                self._finish(sequence, "abort")
        if mode == "wait":
            self.state = "draining"
            self._on_quiet.append(on_quiet)
            self._check_drained()
        else:
            self.state = "paused"
            self._end_drain(
                None if mode == "abort" else Conflict("paused with mode keep meanwhile")
            )
            on_quiet(None)

    def resume(self) -> None:
        self.state = "running"
        self._end_drain(Conflict("resumed before all requests had ended"))

    # Stepping

    @property
    def scores_beside(self) -> bool:
        """Whether a probe may be scored in another thread while this one steps."""
        return self.options.device == "cpu"

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self.state == "paused":
            return False
        waiting = self.scheduler.has_waiting and self.state == "running"
        return bool(self.scheduler.running) or waiting or self._drains_more

    def step(self) -> None:
        """Compute one batch: a token for every decoding sequence, and a chunk of each prefill."""
        with torch.inference_mode():
            self._step()

    def _step(self) -> None:
        if self.overlapped is not None and self.overlapped.in_flight:
            self.overlapped.advance()
            self.steps += self.overlapped.in_flight
            self._check_drained()
            return
        self._admit()
        late = self._wait_for_masks()
        # A sequence without its mask misses this step. Its slot stays as it is.
        works = [
            work for work in self.scheduler.plan() if not work.samples or work.sequence not in late
        ]
        if not works:
            wait_for_masks(late.values(), IDLE_WAIT_SECONDS)
            return
        self.steps += 1
        if self.overlapped is not None:
            works = self.overlapped.launch(self.served.weights, works)
            if not works:
                return
        result = self.runner.run(self.served.weights, works)
        # Wipe all broken slots before failing any request: a failure ends the other choices of
        # its request, and ending them stores what they computed in the prefix cache.
        for work in result.broken:
            self.wipe(work.sequence)
        for work in result.broken:
            self._fail_broken(work.sequence)
        for work, sampled in result.sampled:
            self.take(work.sequence, sampled)
        self._check_drained()

    def _wait_for_masks(self) -> dict[Sequence, GrammarMatcher]:
        """Wait briefly for the masks of running sequences; return those without one.

        A grammar may be slow to advance. If steps waited for it, its request would slow down all
        others.
        """
        matchers = {s: s.matcher for s in self.scheduler.running if s.matcher is not None}
        # A mask that was late before gets no second grace, so it delays one step and not many.
        wait_for_masks([m for m in matchers.values() if not m.late], MASK_GRACE_SECONDS)
        late: dict[Sequence, GrammarMatcher] = {}
        for sequence, matcher in matchers.items():
            if not matcher.ready:
                late[sequence], matcher.late = matcher, True
            elif sequence.undecided and (finish := sequence.decide()):
                self._finish(sequence, finish)
        return late

    def score(
        self, token_ids: list[int], *, adapter: str | None = None, weights: Weights | None = None
    ) -> list[float]:
        """Return the logprobs of every token after the first. Works while paused."""
        return self.score_all([token_ids], adapter=adapter, weights=weights)[0]

    def score_all(
        self,
        sequences: list[list[int]],
        *,
        adapter: str | None = None,
        weights: Weights | None = None,
    ) -> list[list[float]]:
        """Score several sequences, as many at a time as slots are free. See `score`."""
        self.check_scorable(sequences)
        served = None if adapter is None else self.served.adapter(adapter)
        # Running sequences occupy the first slots; the range ends with the scratch slot.
        free = range(len(self.scheduler.running), self.cache.slots + 1)
        with torch.inference_mode():
            return score_sequences(
                self.model,
                weights or self.served.weights,
                self.cache,
                sequences,
                adapter=served,
                free=free,
                budget=self.options.max_batch_tokens,
            )

    def check_scorable(self, sequences: list[list[int]]) -> None:
        """Raise BadTokenId or PromptTooLong for sequences that cannot be scored."""
        for token_ids in sequences:
            check_ids(token_ids, self.config.vocab_size)
            if len(token_ids) > self.max_len:
                raise PromptTooLong(
                    f"This model's maximum context length is {self.max_len} tokens. However, "
                    f"{len(token_ids)} tokens are to be scored. Score a shorter sequence.",
                    param="token_ids",
                )

    def _admit(self) -> None:
        begun_only = self.state == "draining"
        while self.state != "paused" and (sequence := self.scheduler.next_ready(begun_only)):
            request = sequence.request
            if sequence.begun and sequence.leader is not None:
                # The request is in flight already: this choice uses the adapter of the first one,
                # even if the name has been reloaded since, and aborts if the version has changed.
                sequence.adapter = sequence.leader.adapter
                if request.weight_version not in (None, self.served.weights.version):
                    self._finish(sequence, "abort")
                    continue
            else:
                # Weights and adapters may have changed while the request was queued.
                try:
                    self.served.check_served(request)
                except LockstepError as error:
                    self._fail(self.handles[sequence], error)
                    continue
                if request.adapter is not None:
                    sequence.adapter = self.served.adapter(request.adapter)
            slot = self.scheduler.start(sequence)
            self.prompt_tokens += sequence.prompt_len if sequence.index == 0 else 0
            self._load_prefix(sequence, slot)

    def _load_prefix(self, sequence: Sequence, slot: int) -> None:
        adapter = None if sequence.adapter is None else sequence.adapter.uid
        sequence.root = root_name(self.served.weights.epoch, adapter, sequence.request.cache_salt)
        if sequence.wants_prompt_logprobs or sequence.request.skip_prefix_cache:
            return
        leader = sequence.leader
        if leader is not None and self._has_prompt(leader, sequence.root):
            # Copy all but the last prompt token, whose logits are still needed. The prefix cache
            # would give only whole blocks.
            sequence.computed = sequence.prompt_len - 1
            self.cache.move(self.scheduler.running.index(leader), slot, sequence.computed)
            self.prefixes.queries += len(sequence.tokens)
            self.prefixes.hits += sequence.computed
        else:
            sequence.computed = self.prefixes.load(sequence.root, sequence.tokens, slot)

    def _has_prompt(self, leader: Sequence, root: bytes) -> bool:
        """Return whether the slot of the first choice holds the prompt, computed under `root`."""
        return (
            leader.root == root
            and leader.computed >= leader.prompt_len
            and leader in self.scheduler.running
        )

    def wipe(self, sequence: Sequence) -> None:
        """Zero the slot of a sequence that computed NaN or infinity, so that it is never reused."""
        if sequence in self.scheduler.running:
            self.cache.wipe(self.scheduler.running.index(sequence))
            sequence.computed = 0

    def take(self, sequence: Sequence, sampled: Sampled) -> None:
        """Add a sampled token to its sequence, unless the request has been dropped."""
        handle = self.handles.get(sequence)
        if handle is None:
            return
        if sequence.error is not None:
            self._fail(handle, sequence.error)
            return
        if not usable(sampled.logprob):
            self._fail_broken(sequence, sampled.logprob)
            return
        if sequence.generated == 0:
            # Store the prompt now: the other choices of the request and the next turn reuse it.
            slot = self.scheduler.running.index(sequence)
            self.prefixes.store(sequence.root, sequence.tokens, slot)
        self.generated_tokens += 1
        if finish := sequence.append(sampled, self.served.version_of(sequence.adapter)):
            self._finish(sequence, finish, sampled)
        elif handle.stream:
            handle.deliver(StreamedToken(sequence.index, sampled, version=sequence.versions[-1]))

    # Endings

    def _finish(self, sequence: Sequence, finish: Finish, last: Sampled | None = None) -> None:
        """End a sequence and deliver its completion. `last` is a token not delivered yet."""
        handle = self.handles.pop(sequence, None)
        if handle is None:
            return
        sequence.finish = finish
        # Read the experts before `_leave`, which gives the slot to another sequence.
        experts = None
        if self.cache.experts is not None and sequence in self.scheduler.running:
            slot = self.scheduler.running.index(sequence)
            experts = experts_of(sequence, self.cache.experts[slot, : sequence.computed])
        self._leave(sequence)
        record = completion(sequence, finish, experts, self.options, self.config.vocab_size)
        handle.completions[sequence.index] = record
        if handle.stream:
            handle.deliver(StreamedToken(sequence.index, last, record))
        elif len(handle.completions) == len(handle.sequences):
            handle.deliver([handle.completions[s.index] for s in handle.sequences])

    def _fail(self, handle: RequestHandle, error: LockstepError) -> None:
        self._forget(handle)
        handle.deliver(error)

    def _fail_broken(self, sequence: Sequence, logprob: float = float("nan")) -> None:
        if (handle := self.handles.get(sequence)) is None:
            return
        matcher, grammar = sequence.matcher, sequence.request.sampling.grammar
        if matcher is not None and grammar is not None and matcher.process.error:
            self._fail(handle, self.grammars.reject(grammar, matcher.process))
        elif matcher is not None and matcher.error:
            self._fail(
                handle,
                BadRequest(
                    f"the grammar could not be followed to its end: {matcher.error}",
                    param="structured_outputs",
                ),
            )
        else:
            error = BadLogprob(
                f"the model gave logprob {logprob} at position {sequence.generated} of choice "
                f"{sequence.index} under version {self.served.weights.version!r}"
            )
            self._fail(handle, error)

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot of a sequence and store what it computed in the prefix cache."""
        if sequence in self.scheduler.running:
            slot = self.scheduler.running.index(sequence)
            self.prefixes.store(sequence.root, sequence.tokens[: sequence.computed], slot)
        self.scheduler.remove(sequence)

    # Internal

    def _restart_running(self) -> None:
        """Make all running sequences recompute their keys and values under the current weights."""
        for slot, sequence in list(enumerate(self.scheduler.running)):
            rows = self.cache.experts
            wanted = rows is not None and sequence.request.experts_start is not None
            sequence.restart(
                rows[slot, : sequence.computed] if wanted and rows is not None else None
            )
            self._load_prefix(sequence, slot)
        # A separate loop: ending a sequence moves others between slots.
        for sequence in list(self.scheduler.running):
            if sequence.request.weight_version not in (None, self.served.weights.version):
                self._finish(sequence, "abort")

    def _collect(self) -> None:
        """Take the tokens of a step still in flight, which the next operation must see."""
        if self.overlapped is not None:
            self.overlapped.collect()

    def _overlapped_runner(self) -> OverlappedRunner | None:
        """Return the runner that replays CUDA graphs, or None without a GPU or Triton."""
        if not self.cache.k.is_cuda or find_spec("triton") is None:
            return None
        from lockstep.engine.cuda.start import overlapped_runner

        return overlapped_runner(self)

    def _warm(self) -> str:
        """Compile the kernels that the first requests need; return a note of what was compiled."""
        if not self.cache.k.is_cuda or find_spec("triton") is None:
            return ""
        from lockstep.engine.cuda.start import start

        return start(self, self.options.warm_seconds)

    @property
    def _drains_more(self) -> bool:
        """Whether a request in flight has choices to start before a `wait` pause can end."""
        return self.state == "draining" and any(s.begun for s in self.scheduler.waiting)

    def _end_drain(self, error: LockstepError | None) -> None:
        callbacks, self._on_quiet = self._on_quiet, []
        for on_quiet in callbacks:
            on_quiet(error)

    def _check_drained(self) -> None:
        """Complete a `wait` pause once the last request in flight has ended."""
        if self.state == "draining" and not self.scheduler.running and not self._drains_more:
            self.state = "paused"
            self._end_drain(None)
