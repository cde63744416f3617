"""The defaults at a prefix break are written once, and whoever takes one takes it from there."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import lockstep
from lockstep.client import Chat, Policy
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.ledger import Ledger
from lockstep.ledger.breaks import CLIENT_BREAKS, GATEWAY_BREAKS, TRAINER_BREAKS, check_breaks
from lockstep.tokens.errors import BadRequest


def test_who_writes_the_conversation_is_told_and_who_cannot_mend_it_goes_on() -> None:
    assert (CLIENT_BREAKS, GATEWAY_BREAKS, TRAINER_BREAKS) == ("strict", "fork", "fork")
    for taker in (Policy.chat, Chat.__init__, Ledger.__init__):
        assert inspect.signature(taker).parameters["breaks"].default is CLIENT_BREAKS
    assert inspect.signature(Sessions.open).parameters["breaks"].default is GATEWAY_BREAKS


def test_no_other_module_spells_a_default_out() -> None:
    package = Path(lockstep.__file__).parent
    spelled = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == "fork"
    ]
    of_branches = {"ledger/lineage.py", "tokens/lineage.py"}  # a kind of branch, not a default
    assert set(spelled) - of_branches == {"ledger/breaks.py"}


def test_another_value_is_refused_by_name() -> None:
    assert check_breaks("fork") == "fork"
    with pytest.raises(BadRequest, match="X-Session-Breaks is 'maybe': expected strict or fork"):
        check_breaks("maybe", "X-Session-Breaks")
