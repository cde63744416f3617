"""The pages about TRL and verifiers do what they say, with both as a reader has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import RUN, blocks
from tests.docs.page_runner import reading
from tests.trainers.test_trl import PYTHON


@pytest.mark.parametrize("needs", ["trl", "verifiers"])
@pytest.mark.timeout(400)
def test_the_page_does_what_it_says(needs: str, tmp_path: Path) -> None:
    chosen = [block for block in blocks(f"docs/{needs}.md") if block.language in RUN]
    with reading(tmp_path) as reader:
        for at, block in enumerate(chosen):
            reader.run(block)
            if at == 0:  # the server is up; the rest is for the other terminal
                reader.environ["PATH"] = f"{PYTHON.parent}:{reader.environ['PATH']}"
    assert {block.needs for block in chosen} == {None, needs}
