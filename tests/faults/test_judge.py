"""The judge of the campaign notices what it is there for."""

from __future__ import annotations

from pathlib import Path

from lockstep.tokens import VersionSpan
from tests.faults.traffic import SEQUENCES, Completed, Reference, lost


def test_a_false_label_a_mixture_and_a_lost_turn_are_noticed(tmp_path: Path) -> None:
    reference = Reference(tmp_path)
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    under = {label: [0.0, *reference.score(ids, label)] for label in ("default", "a", "b")}

    def answer(logprobs: list[float], *spans: VersionSpan) -> Completed:
        return Completed(ids, logprobs, spans)

    whole = VersionSpan("a", 4, 8)
    halves = VersionSpan("a", 4, 6), VersionSpan("b", 6, 8)
    mixed = under["a"][:6] + under["b"][6:]
    assert reference.wrong(answer(under["a"], whole)) is None
    assert reference.wrong(answer(mixed, *halves)) is None
    assert "token 4" in (reference.wrong(answer(under["b"], whole)) or "")
    assert "token 6" in (reference.wrong(answer(mixed, whole)) or "")
    assert "never given" in (reference.wrong(answer(mixed, VersionSpan("c", 4, 8))) or "")
    adapted = [0.0, *reference.score(ids, "a", "lora")]
    label = f"a+lora@{reference.adapter_label}"
    assert reference.wrong(answer(adapted, VersionSpan(label, 4, 8))) is None
    assert "token 4" in (reference.wrong(answer(under["a"], VersionSpan(label, 4, 8))) or "")
    assert "never given" in (reference.wrong(answer(adapted, VersionSpan(label + "x", 4, 8))) or "")
    scores = [reference.score(list(ids), "b") for ids in SEQUENCES]
    assert reference.held(scores) == "b"
    assert reference.held([[value - 0.01 for value in row] for row in scores]) is None
    sample = answer(under["a"], whole)
    assert lost([[7, 8], [9]], [sample]) == []
    assert lost([[7, 8], [8, 7]], [sample]) == [[8, 7]]
    assert lost([[1]], []) == [[1]]
