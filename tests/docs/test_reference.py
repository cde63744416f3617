"""The reference pages are what the code says, and complete."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

from lockstep.settings import Settings
from lockstep.tokens.errors import BY_CODE
from tests.docs.blocks import ROOT

SCRIPT = ROOT / "scripts" / "reference.py"
PAGES = ROOT / "docs" / "reference"


def test_every_error_variable_and_metric_has_its_line() -> None:
    page = (PAGES / "errors.md").read_text()
    assert [code for code in BY_CODE if f"| `{code}` |" not in page] == []
    page = (PAGES / "environment.md").read_text()
    names = [f"LOCKSTEP_{each.name.upper()}" for each in fields(Settings)]
    assert [name for name in names if f"| `{name}` |" not in page] == []
    page = (PAGES / "metrics.md").read_text()
    assert "| `lockstep_gateway_requests_total` | counter | `route`, `status` |" in page
    assert "| `lockstep_worker_generated_tokens_total` | counter | `model` |" in page


def test_the_pages_are_those_of_the_code() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
