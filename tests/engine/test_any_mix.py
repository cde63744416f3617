"""Any mix of requests, aborts, pauses, swaps and flushes gives each request what it gets alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from lockstep.tokens import Completion
from lockstep.tokens.errors import Conflict, LockstepError, UnknownModel, VersionUnavailable
from tests.engine.rig import Answer, Rig, ids

STEMS = [ids(1, 30), ids(2, 50), ids(1, 30) + ids(3, 25), [4]]
ADAPTERS = ("a", "b")
KV_BLOCKS = 12

prompts = st.builds(
    lambda stem, extra, cut: (stem + extra)[: max(cut, 1)],
    st.sampled_from(STEMS), st.lists(st.integers(0, 9), max_size=4), st.integers(1, 60),
)  # fmt: skip
submits = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "seed": st.integers(0, 5),
        "n": st.sampled_from([1, 1, 1, 2, 4]),
        "max_tokens": st.integers(1, 25),
        "temperature": st.sampled_from([1.0, 0.0, 0.6]),
        "adapter": st.sampled_from([None, None, *ADAPTERS]),
        "cache_salt": st.sampled_from([None, None, "s"]),
        "priority": st.integers(-1, 1),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "request_id": st.sampled_from(["x", "y", "z"]),
        "weight_version": st.sampled_from([None, None, None, "v0"]),
    }
)
ARGUMENTS: dict[str, tuple[int, st.SearchStrategy[Any]]] = {
    # How often a move comes beside the others, and what it needs.
    "submit": (8, submits),
    "step": (12, st.integers(1, 6)),
    "resume": (3, st.none()),
    "commit": (2, st.integers(0, 1)),
    "pause": (2, st.sampled_from(["keep", "wait", "keep", "abort"])),
    "rollback": (1, st.none()),
    "swap adapter": (2, st.sampled_from(ADAPTERS)),
    "unload adapter": (1, st.sampled_from(ADAPTERS)),
    "abort": (1, st.sampled_from(["x", "y", "z"])),
    "drop": (1, st.integers(0, 20)),
    "flush": (1, st.none()),
    "score": (1, prompts),
}
moves = st.sampled_from(
    [name for name, (weight, _) in ARGUMENTS.items() for _ in range(weight)]
).flatmap(lambda name: st.tuples(st.just(name), ARGUMENTS[name][1]))


@dataclass
class World:
    """The crowded engine, and a lone one with a slot for one request to compare it with.

    Labels name contents: version "vN" is the weights N % 2, adapter label "L" the directory L % 2.
    """

    crowd: Rig
    alone: Rig
    checkpoints: tuple[Path, Path]
    adapters: tuple[Path, Path]

    def reset(self) -> None:
        self.crowd.core.resume()
        for ticket in list(self.crowd.core.handles.values()):
            self.crowd.core.drop(ticket)
        self.crowd.forget_prefixes()
        self.crowd.core.served.adapters.clear()
        self.commits = 0
        self.labels = dict.fromkeys(ADAPTERS, 0)
        self._serve(self.crowd, "v0")
        self.crowd.core.served.previous = None
        for name in ADAPTERS:
            self.crowd.adopt(name, self.adapters[0], "0")

    def _serve(self, rig: Rig, version: str) -> None:
        rig.load(self.checkpoints[int(version[1:]) % 2], version)

    def judge(self, version: str) -> str | None:
        """Makes the lone engine serve a version label; returns the adapter in it."""
        base, _, adapter = version.partition("+")
        if self.alone.core.served.weights.version != base:
            self._serve(self.alone, base)
        if not adapter:
            return None
        name, _, label = adapter.partition(".")[0].partition("@")
        self.alone.adopt(name, self.adapters[int(label) % 2], label)
        return name

    def play(self, move: str, argument: Any, answers: list[Answer]) -> None:
        core = self.crowd.core
        match move:
            case "submit":
                answers.append(self.crowd.submit(**argument))
            case "step":
                self.crowd.run(argument)
            case "abort":
                core.abort(argument)
            case "drop" if answers:
                core.drop(answers.pop(argument % len(answers)).ticket)
            case "pause":
                self.crowd.pause(argument)
            case "resume":
                core.resume()
            case "commit":
                # The parity of the label says which weights it names.
                self.commits += 2 - (self.commits + argument) % 2
                self._serve(self.crowd, f"v{self.commits}")
            case "rollback":
                core.rollback()
            case "swap adapter":
                self.labels[argument] += 1
                label = self.labels[argument]
                self.crowd.adopt(argument, self.adapters[label % 2], str(label))
            case "unload adapter":
                core.served.remove_adapter(argument)
            case "flush":
                self.crowd.forget_prefixes()
            case "score":
                self.alone.forget_prefixes()
                self.judge(core.served.weights.version)
                assert core.score(argument) == self.alone.core.score(argument)

    def check(self, done: Completion, asked: dict[str, Any]) -> None:
        if len(done.versions) == 1 and done.finish != "abort":
            expected = self.generate_alone(done, asked)
            assert done.token_ids == expected.token_ids
            assert done.logprobs == expected.logprobs
            assert done.finish == expected.finish
        whole = done.prompt_ids + done.token_ids
        for span in done.versions:
            adapter = self.judge(span.version)
            scored = self.alone.core.score(whole, adapter=adapter)[len(done.prompt_ids) - 1 :]
            assert done.logprobs[span.start : span.end] == scored[span.start : span.end]
        if done.prompt_logprobs is not None and len(done.versions) == 1:
            adapter = self.judge(done.versions[0].version)
            found = [entry.logprob for entry in done.prompt_logprobs if entry]
            if done.index == 0:
                assert found == self.alone.core.score(done.prompt_ids, adapter=adapter)

    def generate_alone(self, done: Completion, asked: dict[str, Any]) -> Completion:
        self.alone.forget_prefixes()
        adapter = self.judge(done.versions[0].version)
        seed = asked["seed"] + done.index
        return self.alone.generate(
            done.prompt_ids, seed=seed, adapter=adapter,
            max_tokens=asked["max_tokens"], temperature=asked["temperature"],
        )  # fmt: skip


@pytest.fixture(scope="module")
def world(tiny: Path, tiny2: Path, lora_a: Path, lora_b: Path) -> World:
    crowd = Rig(tiny, max_model_len=128, max_seqs=3, max_batch_tokens=16)
    config = crowd.core.config
    block_bytes = 4 * 2 * config.layers * config.kv_size * 16
    crowd = Rig(tiny, max_model_len=128, max_seqs=3, max_batch_tokens=16,
                prefix_cache_bytes=KV_BLOCKS * block_bytes)  # fmt: skip
    alone = Rig(tiny, max_model_len=128, max_seqs=1, max_batch_tokens=4096)
    return World(crowd, alone, (tiny, tiny2), (lora_a, lora_b))


@settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(script=st.lists(moves, min_size=20, max_size=80))
def test_each_request_gets_what_it_would_have_got_alone(
    world: World, script: list[tuple[str, Any]]
) -> None:
    world.reset()
    answers: list[Answer] = []
    for move, argument in script:
        try:
            world.play(move, argument, answers)
        except (Conflict, UnknownModel, VersionUnavailable) as refused:
            note(f"{move} was refused: {refused}")
    world.crowd.core.resume()
    world.crowd.run()
    assert world.crowd.idle
    for answer in answers:
        assert answer.done, "every request is answered, once"
        assert sum(isinstance(e, list | LockstepError) for e in answer.events) == 1
        sampling = answer.ticket.request.sampling
        if answer.error is not None:
            assert isinstance(answer.error, UnknownModel | VersionUnavailable)
            continue
        assert [c.index for c in answer.completions] == list(range(sampling.n))
        asked = {name: getattr(sampling, name) for name in ("seed", "max_tokens", "temperature")}
        for done in answer.completions:
            world.check(done, asked)
