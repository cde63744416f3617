"""Stop strings in the engine: a choice ends with the token that completes one, and keeps all
tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.tokens import Completion
from lockstep.tokens.errors import UnsupportedField
from tests.engine.rig import Rig, ids


@pytest.fixture(scope="module")
def rig(tiny: Path) -> Rig:
    return Rig(tiny)


def pieces(rig: Rig, completion: Completion) -> list[bytes]:
    return [rig.core.vocabulary.text(token) for token in completion.token_ids]


@pytest.fixture(scope="module")
def free(rig: Rig) -> Completion:
    """The completion without any stop string."""
    return rig.generate(ids(41, 20), max_tokens=40)


def stopped(rig: Rig, **options: Any) -> Completion:
    return rig.generate(ids(41, 20), max_tokens=40, **options)


@pytest.mark.failure_mode("F66")
def test_a_choice_ends_with_the_token_that_completes_the_string(rig: Rig, free: Completion) -> None:
    text = pieces(rig, free)
    # A string that begins within one token and ends within another.
    stop = (text[10] + text[11] + text[12])[:-1].decode() or "?"
    first = next(at for at in range(40) if stop.encode() in b"".join(text[: at + 1]))
    completion = stopped(rig, stop=(stop,))
    assert completion.token_ids == free.token_ids[: first + 1]
    assert completion.logprobs == free.logprobs[: first + 1]
    assert (completion.finish, completion.stop_reason) == ("stop", stop)
    assert completion.stop_token is None
    assert completion.stop_tokens is not None
    assert stop.encode() in b"".join(text[first + 1 - completion.stop_tokens : first + 1])


def test_a_string_that_never_occurs_changes_nothing(rig: Rig, free: Completion) -> None:
    completion = stopped(rig, stop=("never in this text",))
    assert completion.token_ids == free.token_ids
    assert (completion.finish, completion.stop_reason) == ("length", None)


def test_nothing_ends_before_min_tokens(rig: Rig, free: Completion) -> None:
    text = pieces(rig, free)
    stop = text[0].decode(errors="ignore") or text[1].decode(errors="ignore")
    completion = stopped(rig, stop=(stop,), min_tokens=6)
    assert len(completion.token_ids) > 6


def test_every_choice_and_every_stream_ends_alike(rig: Rig, free: Completion) -> None:
    text = pieces(rig, free)
    stop = text[5].decode(errors="ignore") or "e"
    whole = rig.submit(ids(41, 20), max_tokens=40, n=3, stop=(stop,))
    streamed = rig.submit(ids(41, 20), max_tokens=40, n=3, stop=(stop,), stream=True)
    rig.run()
    ends = [piece.completion for piece in streamed.pieces if piece.completion is not None]
    assert sorted(ends, key=lambda one: one.index) == whole.completions


def test_a_special_token_is_a_stop_string_only_as_a_whole(rig: Rig) -> None:
    special = rig.core.vocabulary
    special.load("stop")
    end = next(at for at in rig.core.config.eos_ids if special.special(at))
    name = special.special(end) or ""
    forced = {"allowed_token_ids": (end,), "ignore_eos": True}
    assert rig.generate(ids(42, 9), stop=(name,), **forced).stop_reason == name
    assert rig.generate(ids(42, 9), stop=(name[1:4],), **forced).stop_reason is None


def test_stop_strings_without_a_tokenizer_are_rejected(tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UnsupportedField, match="stop_token_ids") as refused:
        Rig(bare).generate(ids(41, 20), stop=("x",))
    assert refused.value.param == "stop"
