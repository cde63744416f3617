"""The bundled models load, are as small as promised and have the skills their cards claim."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.models import BUNDLED, bundled
from rollout import play
from tasks import Calc, Guess, Reverse
from tokenizers import Tokenizer

ADDED = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<think>", False),
    ("</think>", False),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
)


def directory(name: str) -> Path:
    path = bundled(name)
    assert path is not None
    return path


@pytest.fixture(scope="module", params=BUNDLED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(directory(name))


@pytest.fixture(scope="module")
def model(name: str) -> Iterator[Any]:
    """The model, on one thread: for so small a model a second one only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(directory(name)).eval()
    torch.set_num_threads(threads)


def test_a_name_that_is_not_bundled_has_no_directory() -> None:
    assert bundled("Qwen/Qwen3-0.6B") is None
    assert bundled("../models/tiny") is None


def test_every_directory_is_complete(name: str) -> None:
    files = {path.name for path in directory(name).iterdir()}
    assert files == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_all_models_together_stay_under_eight_megabytes() -> None:
    sizes = [path.stat().st_size for name in BUNDLED for path in directory(name).iterdir()]
    assert sum(sizes) < 8_000_000


def test_added_tokens_are_the_last_ids_and_flagged_as_in_qwen3(tokenizer: Any) -> None:
    assert len(tokenizer) == 512
    decoder = tokenizer.added_tokens_decoder
    added = [(decoder[i].content, decoder[i].special) for i in sorted(decoder)]
    assert added == list(ADDED)
    assert sorted(decoder) == list(range(503, 512))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.bos_token is None
    assert tokenizer.unk_token is None


def test_generation_stops_at_both_end_tokens(name: str, tokenizer: Any) -> None:
    settings_ = json.loads((directory(name) / "generation_config.json").read_text())
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert settings_["eos_token_id"] == ends
    assert settings_["pad_token_id"] == ends[1]


@pytest.mark.parametrize("name", ["tiny"], scope="module")
@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_raw_and_wrapped_tokenizer_agree(name: str, tokenizer: Any) -> None:
    raw = Tokenizer.from_file(str(directory(name) / "tokenizer.json"))
    for text in ("What's 417 + 86?\n\n  A naïve\tcafé…", "<think>\n\n</think>\n\n<tool_call>"):
        assert raw.encode(text).ids == tokenizer.encode(text, add_special_tokens=False)


def test_the_weights_fill_the_model_exactly(name: str) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(directory(name), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_sampled_reversals_are_better_than_chance(model: Any, tokenizer: Any) -> None:
    """A string that is merely copied agrees with its reversal in a fifth of its places."""
    torch.manual_seed(0)
    rng = random.Random(11)
    episodes = [Reverse(rng) for _ in range(32)]
    texts = [turns[0] for turns in play(model, tokenizer, episodes)]
    agreement = [
        sum(a == b for a, b in zip(text, episode.right(), strict=False)) / len(episode.digits)
        for text, episode in zip(texts, episodes, strict=True)
    ]
    assert sum(agreement) / len(agreement) > 0.35


def test_sampled_calc_both_calls_the_tool_and_does_not(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    rng = random.Random(12)
    episodes = [Calc(rng) for _ in range(32)]
    play(model, tokenizer, episodes)
    assert 0.1 < sum(episode.called for episode in episodes) / 32 < 0.9


def test_guesses_are_numbers_in_range(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    rng = random.Random(13)
    episodes = [Guess(rng) for _ in range(16)]
    texts = [text for turns in play(model, tokenizer, episodes) for text in turns]
    assert sum(text.isdigit() and len(text) <= 2 for text in texts) / len(texts) > 0.9
