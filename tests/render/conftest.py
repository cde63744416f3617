"""What the render tests share: the bundled renderer, and completions to feed a ledger with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.render import Renderer
from tests import tokenizers as real_tokenizers

pytest.importorskip("renderers")
pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer.load("tiny")


@pytest.fixture(scope="session")
def template_renderer() -> Renderer:
    return Renderer.load("tiny", thinking="template")


@pytest.fixture(scope="session")
def real_tokenizer() -> Callable[[str], Path]:
    """A real tokenizer's directory; the test is skipped where it cannot be had."""

    def obtain(name: str) -> Path:
        try:
            place: Path = real_tokenizers.directory(name)
        except real_tokenizers.Unobtainable as why:
            pytest.skip(str(why))
        return place

    return obtain
