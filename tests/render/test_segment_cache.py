"""A text encoded by its segments has the ids that the tokenizer gives the whole."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.render import Renderer
from lockstep.render import segment_cache as segments
from lockstep.render.segment_cache import SegmentCache
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

ALPHABET = "ab Z019 _-.,'\"<>|/\\\n\r\t{}[]()#é\u0301ß\u1e9b\u0323ﬁ中文\u3000😀\u200d\u00a0İı"


def backend_of(name: str, real_tokenizer: Callable[[str], Path]) -> Any:
    renderer = Renderer.load(name if name == "tiny" else real_tokenizer(name))
    return renderer.tokenizer.backend_tokenizer


def texts(backend: Any, count: int) -> list[str]:
    """Random characters with marks, halves of marks and marks in a row among them."""
    draw = random.Random(0)
    marks = [token.content for token in backend.get_added_tokens_decoder().values()]
    made = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randrange(1, 12)):
            mark = draw.choice(marks)
            parts.append(draw.choice((mark, mark[: draw.randrange(len(mark))], mark + mark, " ")))
            parts.append("".join(draw.choices(ALPHABET, k=draw.randrange(20))))
        made.append("".join(parts))
    return made


@pytest.mark.parametrize("name", ["tiny", "qwen3", "llama3_2", "deepseek_v3", "gemma3"])
def test_segments_give_the_ids_of_the_whole_text(
    name: str, real_tokenizer: Callable[[str], Path]
) -> None:
    backend = backend_of(name, real_tokenizer)
    cache = SegmentCache.of(backend)
    assert cache is not None
    for text in texts(backend, 400):
        whole = backend.encode(text, add_special_tokens=False).ids
        assert cache.encode(text) == whole
        assert cache.encode(text) == whole  # from what was kept


def test_what_is_kept_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Renderer.load("tiny").tokenizer.backend_tokenizer
    monkeypatch.setattr(segments, "KEPT", 1000)
    cache = SegmentCache.of(backend)
    assert cache is not None
    for text in (str(number) * 10 for number in range(100)):
        assert cache.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert cache._size <= 1000
    assert list(cache._known)[-1] == "99" * 10
    assert cache._size == sum(len(text) + segments.PER_SEGMENT for text in cache._known)


def test_threads_share_segments() -> None:
    backend = Renderer.load("tiny").tokenizer.backend_tokenizer
    cache = SegmentCache.of(backend)
    assert cache is not None
    samples = texts(backend, 100)
    wanted = [backend.encode(text, add_special_tokens=False).ids for text in samples]
    seen: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: seen.append([cache.encode(text) for text in samples]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [wanted] * 4


def words(**token: bool) -> Tokenizer:
    """A tokenizer whose every word is known, with one mark."""
    made = Tokenizer(models.WordLevel({"▁a": 0, "a": 1, "?": 2}, unk_token="?"))
    made.add_special_tokens([AddedToken("<m>", normalized=False, **token)])
    return made


def cut_ids(backend: Tokenizer, text: str) -> list[int]:
    """What cutting would give, whether it may or not."""
    return SegmentCache(backend, {"<m>": backend.token_to_id("<m>")}).encode(text)


def test_a_tokenizer_that_looks_where_a_segment_stands_is_not_cut() -> None:
    backend = words()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    text = "a<m>a"
    assert cut_ids(backend, text) != backend.encode(text, add_special_tokens=False).ids
    assert SegmentCache.of(backend) is None


def test_marks_that_swallow_what_is_beside_them_are_not_cut_at() -> None:
    backend = words(lstrip=True, rstrip=True)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    text = "a <m> a"
    assert cut_ids(backend, text) != backend.encode(text, add_special_tokens=False).ids
    assert SegmentCache.of(backend) is None


def test_marks_that_are_words_only_are_not_cut_at() -> None:
    backend = words(single_word=True)
    text = "a<m>a"
    assert cut_ids(backend, text) != backend.encode(text, add_special_tokens=False).ids
    assert SegmentCache.of(backend) is None


def test_a_tokenizer_that_truncates_is_not_cut() -> None:
    backend = words()
    assert SegmentCache.of(backend) is not None
    backend.enable_truncation(1)
    assert cut_ids(backend, "a<m>a") != backend.encode("a<m>a", add_special_tokens=False).ids
    assert SegmentCache.of(backend) is None
