"""The prefix cache hits only when everything that determines the contents is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.cache import BLOCK, PrefixCache, SlotCache, block_names, root_name
from lockstep.engine.options import EngineOptions
from lockstep.tokens.errors import BadRequest
from tests.engine.checkpoints import reference
from tests.engine.rig import Rig, ids

PROMPT = ids(1, 100)


@pytest.fixture
def rig(tiny: Path, lora_a: Path, lora_b: Path) -> Rig:
    rig = Rig(tiny)
    rig.adopt("a", lora_a)
    rig.adopt("b", lora_b)
    return rig


def hits_of(rig: Rig, prompt: list[int] = PROMPT, **options: Any) -> int:
    before = rig.core.prefixes.hits
    rig.generate(prompt, max_tokens=2, **options)
    return rig.core.prefixes.hits - before


def test_the_same_prompt_hits_all_but_its_last_block(rig: Rig) -> None:
    assert hits_of(rig) == 0
    assert hits_of(rig) == 96
    assert hits_of(rig, PROMPT[:96]) == 80, "one token at least is left, in a whole block"
    assert hits_of(rig, PROMPT[:50] + ids(2, 50)) == 48
    assert rig.core.prefixes.queries == 100 + 100 + 96 + 100


@pytest.mark.failure_mode("F27")
@pytest.mark.parametrize(
    "other", [{"cache_salt": "tenant"}, {"cache_salt": ""}, {"adapter": "a"}, {"adapter": "b"}]
)
def test_a_salt_or_an_adapter_shares_nothing_with_others(rig: Rig, other: dict[str, Any]) -> None:
    assert hits_of(rig) == 0
    assert hits_of(rig, **other) == 0
    assert hits_of(rig, **other) == 96
    assert hits_of(rig, cache_salt="None") == 0


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F27")
def test_blocks_of_old_weights_are_never_hit_again(rig: Rig, tiny2: Path) -> None:
    assert hits_of(rig) == 0
    # The same label on purpose: contents decide, not names.
    rig.load(tiny2, rig.core.served.weights.version)
    assert hits_of(rig) == 0
    completion = rig.generate(PROMPT)
    assert completion.logprobs == reference(tiny2, PROMPT + completion.token_ids)[-8:]
    rig.core.rollback()
    assert hits_of(rig) == 96, "these weights made those blocks"
    completion = rig.generate(PROMPT)
    assert completion.logprobs == reference(rig.directory, PROMPT + completion.token_ids)[-8:]


@pytest.mark.failure_mode("F27")
def test_the_same_checkpoint_loaded_twice_shares_nothing(rig: Rig, tiny: Path) -> None:
    assert hits_of(rig) == 0
    rig.load(tiny, "default")
    assert hits_of(rig) == 0


def test_output_is_cached_for_the_next_turn(rig: Rig) -> None:
    completion = rig.generate(PROMPT, max_tokens=60)
    assert hits_of(rig, PROMPT + completion.token_ids + ids(3, 5)) == 144


def test_skipping_the_cache_reads_nothing(rig: Rig) -> None:
    first = rig.generate(PROMPT)
    assert hits_of(rig, skip_prefix_cache=True) == 0
    assert rig.generate(PROMPT, skip_prefix_cache=True) == first


@pytest.mark.exact_arithmetic
def test_prompt_logprobs_are_computed_not_cached(rig: Rig) -> None:
    rig.generate(PROMPT)
    before = rig.core.prefixes.hits
    completion = rig.generate(PROMPT, prompt_logprobs=0)
    assert rig.core.prefixes.hits == before
    assert [e.logprob for e in completion.prompt_logprobs or [] if e] == reference(
        rig.directory, PROMPT
    )


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("blocks", [0, 1, 3, 9])
def test_results_are_right_with_a_cache_of_any_size(tiny: Path, blocks: int) -> None:
    whole = Rig(tiny)
    block_bytes = 4 * 2 * whole.core.config.layers * whole.core.config.kv_size * BLOCK
    rig = Rig(tiny, prefix_cache_bytes=blocks * block_bytes)
    assert rig.core.prefixes.capacity == blocks
    base = ids(1, 40)
    for turn in range(6):
        prompts = [base + ids(turn % 2, 30), base[:20] + ids(2 + turn % 3, 40)]
        results = [rig.submit(prompt, seed=turn) for prompt in prompts]
        rig.run()
        assert len(rig.core.prefixes) <= blocks
        for result, prompt in zip(results, prompts, strict=True):
            assert result.one == whole.generate(prompt, seed=turn)
    assert (rig.core.prefixes.hits > 0) == (blocks > 0)


class Pool:
    """A prefix cache over slots that hold, for each token, the token itself."""

    def __init__(self, tiny: Path, blocks: int) -> None:
        config = ModelConfig.read(tiny)
        self.slots = SlotCache(config, EngineOptions(max_seqs=2), 256, torch.float32)
        block_bytes = 2 * config.layers * config.kv_size * BLOCK * 4
        self.cache = PrefixCache(self.slots, blocks * block_bytes)

    def store(self, root: bytes, tokens: list[int]) -> None:
        marks = torch.tensor(tokens, dtype=torch.float32)
        self.slots.k[:, 0, :, : len(tokens)] = marks[None, None, :, None]
        self.slots.v[:, 0, :, : len(tokens)] = -marks[None, None, :, None]
        self.cache.store(root, tokens, 0)

    def load(self, root: bytes, tokens: list[int]) -> int:
        """Load a prefix and return its length, after checking that its contents match these
        tokens."""
        self.slots.k[:, 1] = self.slots.v[:, 1] = torch.nan
        loaded = self.cache.load(root, tokens, 1)
        marks = torch.tensor(tokens[:loaded], dtype=torch.float32)[None, None, :, None]
        assert bool((self.slots.k[:, 1, :, :loaded] == marks).all())
        assert bool((self.slots.v[:, 1, :, :loaded] == -marks).all())
        return loaded


def test_the_start_of_a_chain_outlives_its_end(tiny: Path) -> None:
    """Evicting the first block of a prefix would make all later blocks useless."""
    pool, root = Pool(tiny, blocks=8), root_name(0, None, None)
    old, new = ids(1, 6 * BLOCK + 1), ids(2, 4 * BLOCK + 1)
    pool.store(root, old)
    assert pool.load(root, old) == 6 * BLOCK
    pool.store(root, new)
    assert pool.load(root, new) == 4 * BLOCK
    assert pool.load(root, old) == 4 * BLOCK


def test_a_chain_longer_than_the_cache_keeps_its_start(tiny: Path) -> None:
    pool, root = Pool(tiny, blocks=4), root_name(0, None, None)
    tokens = ids(1, 9 * BLOCK)
    for length in (3 * BLOCK, 6 * BLOCK, 9 * BLOCK):
        pool.store(root, tokens[:length])
        assert pool.load(root, tokens) == min(length, 4 * BLOCK)


@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["store", "load", "clear"]),
            st.integers(0, 2),
            st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5),
            st.integers(0, BLOCK),
        ),
        max_size=25,
    ),
    blocks=st.integers(0, 6),
)
def test_loaded_blocks_are_those_that_were_stored(
    tiny: Path, moves: list[tuple[str, int, list[int], int]], blocks: int
) -> None:
    pool = Pool(tiny, blocks)
    stored: set[tuple[int, tuple[int, ...]]] = set()
    for move, epoch, pattern, tail in moves:
        tokens = [t for block in pattern for t in [block] * BLOCK] + [3] * tail
        root = root_name(epoch, None, None)
        if move == "clear":
            pool.cache.clear()
            stored.clear()
        elif move == "store":
            pool.store(root, tokens)
            whole = len(tokens) // BLOCK
            stored |= {(epoch, tuple(tokens[: n * BLOCK])) for n in range(1, whole + 1)}
        else:
            loaded = pool.load(root, tokens)
            assert loaded < len(tokens)
            assert not loaded or (epoch, tuple(tokens[:loaded])) in stored
        assert len(pool.cache) <= blocks


def test_block_names_differ_in_everything_that_determines_contents() -> None:
    roots = [
        root_name(epoch, adapter, salt)
        for epoch in (0, 1)
        for adapter in (None, 0, 1)
        for salt in (None, "", "None", "0", "a")
    ]
    assert len(set(roots)) == len(roots)
    tokens = ids(1, 64)
    names = list(block_names(roots[0], tokens, 4))
    moved = list(block_names(roots[0], tokens[16:32] + tokens[:16] + tokens[32:], 4))
    assert not set(names) & set(moved), "a block is named by all tokens before it too"


def test_too_little_memory_for_two_slots_is_rejected_at_start(tiny: Path) -> None:
    with pytest.raises(BadRequest, match="raise kv_bytes or lower max_model_len"):
        Rig(tiny, kv_bytes=1 << 20)
    with pytest.raises(BadRequest, match="prefix_cache_bytes must not be negative"):
        Rig(tiny, prefix_cache_bytes=-1)
    assert Rig(tiny, kv_bytes=4 << 20).core.cache.slots < 8
