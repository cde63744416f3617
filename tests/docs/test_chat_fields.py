"""The table of chat fields in the docs is what the code does."""

from __future__ import annotations

import subprocess
import sys

from lockstep.protocol.openai.chat_decode import NEUTRAL
from lockstep.protocol.openai.chat_request import RECORDED, WITHOUT_EFFECT, ChatRequest
from tests.docs.blocks import ROOT


def test_the_table_in_the_docs_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "chat_fields.py", "--check"], check=True)


def test_a_field_is_treated_in_one_way_only() -> None:
    named = [*NEUTRAL, *RECORDED]
    assert len(named) == len(set(named))
    assert set(named) | set(WITHOUT_EFFECT) <= set(ChatRequest.__struct_fields__)
