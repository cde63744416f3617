"""Exact mode: the engine's logprobs equal the trainer's, bit for bit, in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.numerics.block_shapes import threads
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest
from tests.engine import checkpoints
from tests.engine.rig import Result, Rig, ids

pytestmark = pytest.mark.exact_arithmetic
BATCHES = (1, 3, 33)


@pytest.fixture(scope="module", params=["tiny", "tiny-moe"])
def rig(request: pytest.FixtureRequest) -> Rig:
    directory: Path = request.getfixturevalue({"tiny": "tiny", "tiny-moe": "moe"}[request.param])
    # A budget of 48 tokens cuts prompts into chunks while other requests decode.
    return Rig(directory, arithmetic="exact", max_seqs=33, max_batch_tokens=48)


def all_logprobs(completion: Completion) -> list[float]:
    """Return the logprob of every token after the first: of the scored prompt, then of the
    output."""
    assert completion.prompt_logprobs is not None
    scored = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
    assert len(scored) == len(completion.prompt_ids) - 1
    return scored + completion.logprobs


def check(rig: Rig, results: list[Result]) -> None:
    for result in results:
        completion = result.one
        whole = completion.prompt_ids + completion.token_ids
        expected = checkpoints.reference(rig.directory, whole)
        assert all_logprobs(completion) == expected
        assert rig.core.score(whole) == expected


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_has_the_logprobs_of_the_trainer(rig: Rig, batch: int) -> None:
    results = [
        rig.submit(ids(100 * batch + i, 3 + 5 * i % 90), seed=i, max_tokens=20, prompt_logprobs=0)
        for i in range(batch)
    ]
    rig.run()
    check(rig, results)


def test_a_long_context_has_the_logprobs_of_the_trainer(rig: Rig) -> None:
    long = rig.submit(ids(1, 700), max_tokens=40, prompt_logprobs=0)
    short = rig.submit(ids(2, 30), max_tokens=90, prompt_logprobs=0)
    rig.run()
    check(rig, [long, short])


def test_a_trainer_batch_gives_the_bits_of_each_sequence_alone(rig: Rig) -> None:
    sequences = [ids(seed, length) for seed, length in enumerate((2, 9, 64, 65, 130, 511))]
    with torch.no_grad():
        together = exact.token_logprobs(checkpoints.trainer(rig.directory), sequences)
    for sequence, logprobs in zip(sequences, together, strict=True):
        assert logprobs.tolist() == rig.core.score(sequence)


def test_a_prefix_hit_changes_no_bit(rig: Rig) -> None:
    prompt = ids(5, 200)
    rig.forget_prefixes()
    first = rig.generate(prompt, max_tokens=20)
    hits = rig.core.prefixes.hits
    again = rig.generate(prompt, max_tokens=20)
    assert rig.core.prefixes.hits - hits == 192
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    turn = rig.submit(prompt + first.token_ids + ids(6, 10), max_tokens=20)
    rig.run()
    whole = turn.one.prompt_ids + turn.one.token_ids
    assert turn.one.logprobs == checkpoints.reference(rig.directory, whole)[-20:]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.7])
def test_processed_logprobs_are_the_trainers_at_that_temperature(
    rig: Rig, temperature: float
) -> None:
    completion = rig.generate(
        ids(8, 60),
        temperature=temperature,
        logprob_mode="processed",
        prompt_logprobs=0,
        max_tokens=20,
    )
    whole = completion.prompt_ids + completion.token_ids
    assert all_logprobs(completion) == checkpoints.reference(rig.directory, whole, temperature)


def test_the_trainer_has_the_same_bits_with_autograd_on_and_can_learn(rig: Rig) -> None:
    completion = rig.generate(ids(9, 90), max_tokens=30)
    model = checkpoints.trainer(rig.directory)
    logprobs = exact.token_logprobs(model, completion.prompt_ids + completion.token_ids)
    assert isinstance(logprobs, Tensor)
    assert logprobs.requires_grad
    assert logprobs[-30:].tolist() == completion.logprobs
    (-logprobs.mean()).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    assert gradients
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert any(bool(g.any()) for g in gradients)


@pytest.mark.parametrize("modules", [checkpoints.ATTENTION, checkpoints.ALL_LINEAR])
@pytest.mark.parametrize("rank", [1, 6])
def test_a_lora_request_has_the_logprobs_of_the_peft_model(
    tiny: Path, tmp_path: Path, modules: tuple[str, ...], rank: int
) -> None:
    model = checkpoints.peft_model(tiny, rank=rank, modules=modules, alpha=5)
    model.save_pretrained(tmp_path)
    rig = Rig(tiny, arithmetic="exact", max_batch_tokens=48)
    rig.adopt("poet", tmp_path)
    results = [
        rig.submit(ids(i, 3 + 40 * i), adapter="poet", max_tokens=20, prompt_logprobs=0)
        for i in range(3)
    ]
    results.append(rig.submit(ids(9, 70), max_tokens=20, prompt_logprobs=0))
    rig.run()
    exact.prepare(model)
    for result in results[:3]:
        whole = result.one.prompt_ids + result.one.token_ids
        logprobs = exact.token_logprobs(model, whole)
        assert isinstance(logprobs, Tensor)
        assert all_logprobs(result.one) == logprobs.tolist()
        assert rig.core.score(whole, adapter="poet") == logprobs.tolist()
    check(rig, results[3:])


def test_a_sequence_without_tokens_is_rejected(rig: Rig) -> None:
    model = checkpoints.trainer(rig.directory)
    with pytest.raises(BadRequest, match="empty"):
        exact.token_logprobs(model, [])
    with pytest.raises(BadRequest, match=r"token_ids\[1\] is empty"):
        exact.token_logprobs(model, [[1, 2], []])


def distance_from_transformers(directory: Path) -> float:
    """Return the largest difference of logprobs between close mode and plain transformers."""
    from transformers import AutoModelForCausalLM

    rig = Rig(directory, arithmetic="close", max_seqs=16, max_batch_tokens=64)
    assert rig.core.model.arithmetic.name == "close"
    # Prompts in the model's own words: on noise its logits are so large that fp32 itself is coarse.
    written = [rig.submit([i], seed=i, max_tokens=3 + 9 * i) for i in range(12)]
    rig.run()
    results = [
        rig.submit(result.one.token_ids, max_tokens=20, prompt_logprobs=0) for result in written
    ]
    rig.run()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    worst = 0.0
    for result in results:
        whole = result.one.prompt_ids + result.one.token_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(whole[1:])[:, None])[:, 0]
        apart = (torch.tensor(all_logprobs(result.one)) - expected).abs().max()
        worst = max(worst, float(apart))
    return worst


@pytest.mark.parametrize("name", ["tiny", "moe"])
def test_close_mode_is_close_to_plain_transformers(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory: Path = request.getfixturevalue(name)
    torch.manual_seed(1)
    untrained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    untrained.save_pretrained(tmp_path)
    assert distance_from_transformers(tmp_path) < 5e-6
    # Training sharpens a model: transformers' own fp32 is 7e-6 from its fp64 here.
    assert distance_from_transformers(directory) < 2e-5


@pytest.mark.parametrize("team", [1, 2, 3, 7])
def test_a_trainer_in_any_number_of_threads_has_the_bits_of_the_engine(
    team: int, odd_widths: tuple[Rig, Any]
) -> None:
    """Loops over these widths are split among threads in the middle of a register.

    The few values at the end of a share often round to the same bits, so one sequence may not show
    a difference. Several are compared, with weights large enough for a bit to reach the logprobs.
    """
    rig, model = odd_widths
    sequences = [ids(seed, 1100) for seed in (3, 4, 5)]
    with threads(team), torch.no_grad():
        alone = [exact.token_logprobs(model, sequence).tolist() for sequence in sequences]
        first = sequences[0]
        together = exact.token_logprobs(model, [first[::-1], first, first[:900]])[1]
    assert alone == [rig.core.score(sequence) for sequence in sequences]
    assert together.tolist() == alone[0]


@pytest.fixture(scope="module")
def odd_widths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=200, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("odd")
    model.save_pretrained(directory)
    return Rig(directory, arithmetic="exact", max_model_len=2048), exact.prepare(model)
