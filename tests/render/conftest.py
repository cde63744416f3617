"""Real tokenizers are let go when there are many: kept together they take gigabytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tokenizers


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    yield
    tokenizers.forget_loaded()
