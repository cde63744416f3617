"""Grammars that crash the compiler or never end: each costs its own process, never the engine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import monotonic

import pytest

from lockstep.engine.text.grammar_process import LIMITS
from lockstep.engine.text.grammar_server import CROWDED
from lockstep.engine.text.grammars import Grammars
from lockstep.engine.text.vocabulary import Vocabulary
from lockstep.tokens.errors import BadRequest, Busy, EngineFailure, GrammarLimit
from lockstep.tokens.grammar import Grammar
from tests.engine.rig import Rig, ids

TERMS = " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(1, 25))
INTERSECTION = Grammar("grammar", f"start: A\nA: {TERMS}")
"""424 bytes whose automaton has more than 2 ** 24 states."""
WORD = Grammar("regex", "[a-c]{3}")


def chained_rules(count: int) -> Grammar:
    rules = [f"r{at}: r{at + 1} r{at + 1}" for at in range(count)]
    return Grammar("grammar", "\n".join(["start: r0", *rules, f'r{count}: "x"']))


def chained_references(count: int) -> Grammar:
    links = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "integer"}}}
    return Grammar("json", json.dumps(schema))


@pytest.fixture(scope="module")
def rig(tiny: Path) -> Rig:
    rig = Rig(tiny)
    rig.core.grammars = limited(rig, compile_seconds=2.0)
    return rig


def limited(rig: Rig, **limits: float) -> Grammars:
    changed = {name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__} | limits
    return Grammars(Vocabulary(rig.directory), rig.core.config.vocab_size, type(LIMITS)(**changed))


@pytest.mark.parametrize(
    "grammar", [chained_rules(5000), chained_references(5000)], ids=["rules", "references"]
)
def test_a_long_chain_of_rules_does_not_end_the_engine(rig: Rig, grammar: Grammar) -> None:
    rig.core.grammars = limited(rig)
    result = rig.submit(ids(3, 9), grammar=grammar, max_tokens=2)
    rig.run()
    # A limit of the parser itself may end the request; the process is not ended.
    assert result.error is None or type(result.error) is BadRequest
    assert len(rig.generate(ids(3, 9), grammar=WORD).token_ids) == 3


def test_rules_too_deep_for_the_stack_are_rejected_with_the_limit(rig: Rig) -> None:
    shallow = limited(rig, stack_bytes=4 << 20)
    with pytest.raises(GrammarLimit, match="stack of 4 MiB") as refused:
        shallow.compile(chained_rules(5000))
    assert refused.value.param == "structured_outputs"
    assert shallow.matcher(WORD).mask(()).any()


def test_a_compilation_without_end_is_rejected_with_the_limit_and_not_tried_again(rig: Rig) -> None:
    grammars = limited(rig, compile_seconds=0.5)
    with pytest.raises(GrammarLimit, match=r"CPU time.*0\.5 s to compile"):
        grammars.compile(INTERSECTION)
    grammars.close()  # the server would be started again, and is not
    with pytest.raises(GrammarLimit, match="CPU time"):
        grammars.compile(INTERSECTION)
    assert grammars._server._server is None


def test_a_compilation_beyond_its_memory_is_rejected_with_the_limit(rig: Rig) -> None:
    grammars = limited(rig, memory_bytes=24 << 20, compile_seconds=60.0)
    with pytest.raises(GrammarLimit, match="memory"):
        grammars.compile(INTERSECTION)


def test_all_processes_together_are_bounded_and_the_largest_one_ends(rig: Rig) -> None:
    rig.core.grammars = grammars = limited(rig, total_bytes=48 << 20, compile_seconds=120.0)
    small = rig.submit(ids(52, 25), grammar=WORD, max_tokens=3)
    with pytest.raises(Busy, match="together need more memory than 48 MiB"):
        grammars.compile(INTERSECTION)
    rig.run()
    assert len(small.one.token_ids) == 3
    with pytest.raises(Busy):  # not remembered: later there may be room for it
        grammars.compile(INTERSECTION)


def test_a_grammar_that_had_to_make_room_fails_its_requests_only(rig: Rig) -> None:
    rig.core.grammars = grammars = limited(rig)
    grammar = Grammar("regex", "[b-z]{200}")
    victim = rig.submit(ids(51, 25), grammar=grammar, max_tokens=100)
    other = rig.submit(ids(52, 25), grammar=WORD, max_tokens=3)
    rig.run(2)
    os.kill(grammars._compiled[grammar]._pid, CROWDED)
    rig.run()
    assert isinstance(victim.error, Busy)
    assert len(other.one.token_ids) == 3
    again = rig.submit(ids(51, 25), grammar=grammar, max_tokens=300)
    rig.run()
    assert again.one.finish == "stop"


def test_a_process_that_ends_in_mid_generation_fails_its_own_requests_only(rig: Rig) -> None:
    rig.core.grammars = grammars = limited(rig)
    grammar = Grammar("regex", "[a-z]{200}")
    victim = rig.submit(ids(51, 25), grammar=grammar, max_tokens=100)
    other = rig.submit(ids(52, 25), grammar=WORD, max_tokens=3)
    free = rig.submit(ids(61, 25), max_tokens=12)
    rig.run(2)
    os.kill(grammars._compiled[grammar]._pid, signal.SIGPROF)
    rig.run()
    assert isinstance(victim.error, GrammarLimit)
    assert "2 s to advance" in victim.error.message
    assert len(other.one.token_ids) == 3
    assert len(free.one.token_ids) == 12
    with pytest.raises(GrammarLimit, match="could not be followed"):
        rig.submit(ids(51, 25), grammar=grammar)


def test_a_mask_that_takes_long_delays_no_other_request(rig: Rig) -> None:
    rig.core.grammars = grammars = limited(rig)
    grammar = Grammar("regex", "[d-z]{200}")
    slow = rig.submit(ids(51, 25), grammar=grammar, max_tokens=100)
    rig.run(3)
    pid = grammars._compiled[grammar]._pid
    os.kill(pid, signal.SIGSTOP)
    free = rig.submit(ids(61, 25), max_tokens=12)
    while not free.ended:
        rig.run(1)
    assert len(free.one.token_ids) == 12
    assert not slow.ended
    os.kill(pid, signal.SIGCONT)
    rig.run()
    assert slow.one.finish == "stop"


def test_a_server_that_was_killed_is_started_again(rig: Rig) -> None:
    grammars = limited(rig)
    assert grammars.matcher(WORD).mask(()).any()
    server = grammars._server._server
    assert server is not None
    server.kill()
    server.wait()
    with pytest.raises(EngineFailure, match="started again"):
        grammars.compile(Grammar("regex", "x+"))
    assert grammars.matcher(Grammar("regex", "x+")).mask(()).any()


def test_processes_end_with_their_grammars(rig: Rig) -> None:
    grammars = limited(rig)
    process = grammars.compile(WORD)
    process.close()
    deadline = monotonic() + 60
    while Path(f"/proc/{process._pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert monotonic() < deadline


def test_a_prompt_that_does_not_fit_its_grammar_fails_only_its_request(rig: Rig) -> None:
    rig.core.grammars = rig.core.runner._grammars = limited(rig)
    other = rig.submit(ids(61, 25), max_tokens=12)
    misfit = rig.submit(
        ids(51, 25), grammar=WORD, prompt_logprobs=0, score_start=5, max_tokens=1,
        logprob_mode="processed",
    )  # fmt: skip
    rig.run()
    assert isinstance(misfit.error, BadRequest)
    assert "does not fit the grammar" in misfit.error.message
    assert len(other.one.token_ids) == 12
