"""Any mix of requests, aborts, pauses, swaps and flushes gives each request the result it has
alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from lockstep.tokens import Completion
from lockstep.tokens.errors import Conflict, LockstepError, UnknownModel, VersionUnavailable
from tests.engine.rig import Result, Rig, ids

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
    """A busy engine, and a reference engine with one slot to compare it with.

    Labels name contents: version "vN" is the weights N % 2, adapter label "L" the directory L % 2.
    """

    crowd: Rig
    alone: Rig
    checkpoints: tuple[Path, Path]
    adapters: tuple[Path, Path]

    def reset(self) -> None:
        self.crowd.core.resume()
        for handle in list(self.crowd.core.handles.values()):
            self.crowd.core.drop(handle)
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
        """Make the reference engine serve a version label; return the adapter in it."""
        base, _, adapter = version.partition("+")
        if self.alone.core.served.weights.version != base:
            self._serve(self.alone, base)
        if not adapter:
            return None
        name, _, label = adapter.partition(".")[0].partition("@")
        self.alone.adopt(name, self.adapters[int(label) % 2], label)
        return name

    def play(self, move: str, argument: Any, results: list[Result]) -> None:
        core = self.crowd.core
        match move:
            case "submit":
                results.append(self.crowd.submit(**argument))
            case "step":
                self.crowd.run(argument)
            case "abort":
                core.abort(argument)
            case "drop" if results:
                core.drop(results.pop(argument % len(results)).handle)
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

    def check(self, completion: Completion, options: dict[str, Any]) -> None:
        if len(completion.versions) == 1 and completion.finish != "abort":
            expected = self.generate_alone(completion, options)
            assert completion.token_ids == expected.token_ids
            assert completion.logprobs == expected.logprobs
            assert completion.finish == expected.finish
        whole = completion.prompt_ids + completion.token_ids
        for span in completion.versions:
            adapter = self.judge(span.version)
            scored = self.alone.core.score(whole, adapter=adapter)[len(completion.prompt_ids) - 1 :]
            assert completion.logprobs[span.start : span.end] == scored[span.start : span.end]
        if completion.prompt_logprobs is not None and len(completion.versions) == 1:
            adapter = self.judge(completion.versions[0].version)
            scored = [entry.logprob for entry in completion.prompt_logprobs if entry]
            if completion.index == 0:
                assert scored == self.alone.core.score(completion.prompt_ids, adapter=adapter)

    def generate_alone(self, completion: Completion, options: dict[str, Any]) -> Completion:
        self.alone.forget_prefixes()
        adapter = self.judge(completion.versions[0].version)
        seed = options["seed"] + completion.index
        return self.alone.generate(
            completion.prompt_ids, seed=seed, adapter=adapter,
            max_tokens=options["max_tokens"], temperature=options["temperature"],
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


@pytest.mark.exact_arithmetic
@settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(script=st.lists(moves, min_size=20, max_size=80))
def test_each_request_gets_the_result_it_has_alone(
    world: World, script: list[tuple[str, Any]]
) -> None:
    world.reset()
    results: list[Result] = []
    for move, argument in script:
        try:
            world.play(move, argument, results)
        except (Conflict, UnknownModel, VersionUnavailable) as refused:
            note(f"{move} was refused: {refused}")
    world.crowd.core.resume()
    world.crowd.run()
    assert world.crowd.idle
    for result in results:
        assert result.ended, "every request is answered, once"
        assert sum(isinstance(e, list | LockstepError) for e in result.events) == 1
        sampling = result.handle.request.sampling
        if result.error is not None:
            assert isinstance(result.error, UnknownModel | VersionUnavailable)
            continue
        assert [c.index for c in result.completions] == list(range(sampling.n))
        options = {name: getattr(sampling, name) for name in ("seed", "max_tokens", "temperature")}
        for completion in result.completions:
            world.check(completion, options)
