"""Hypotheses about the tokens in front of the sampled ones, and about rows of a batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.explain.hypotheses.hypothesis import PASS, Candidate, Hypothesis, Trial
from lockstep.explain.setting import Context

THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
TRUNCATIONS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _candidate(
    trial: Trial, cause: str, detail: str, context: Context, *, partial: bool = True
) -> Candidate:
    setting = trial.base.with_(context=context)
    return Candidate(cause, detail, trial.scorer.values(setting), setting, partial=partial)


def rows(trial: Trial) -> Iterator[Candidate]:
    for name, cause, detail in (
        ("after", "off_by_one", "labels are not shifted: the row after each token is read"),
        ("before", "off_by_one", "labels are shifted twice"),
        ("prompt start", "prompt_logprobs", "numbers of the first prompt tokens"),
        ("prompt end", "prompt_logprobs", "numbers of the last prompt tokens"),
    ):
        setting = trial.base.with_(rows=name)
        yield Candidate(cause, detail, trial.scorer.values(setting), setting)
        if name.startswith("prompt"):
            raw = setting.with_(mode="raw")
            yield Candidate(cause, f"{detail}, raw", trial.scorer.values(raw), raw)


def beginning(trial: Trial) -> Iterator[Candidate]:
    config = trial.scorer.config
    first = trial.case.samples[0].token_ids[0]
    marks = {first: "doubled first token"}
    for token in _bos_ids(trial):
        marks[token] = "doubled BOS" if token == first else "BOS added"
    for token, detail in marks.items():
        if 0 <= token < config.vocab_size:
            yield _candidate(trial, "bos", f"{detail} ({token})", Context("insert", ids=(token,)))
    yield _candidate(trial, "bos", "first token missing", Context("drop", count=1))


def truncated(trial: Trial) -> Iterator[Candidate]:
    longest = max(group.start for group in trial.case.groups)
    for count in TRUNCATIONS:
        if count < longest:
            yield _candidate(
                trial, "context", f"prompt cut to its last {count} tokens",
                Context("truncate", count=count),
            )  # fmt: skip


def batch_leaks(trial: Trial) -> Iterator[Candidate]:
    lengths = {len(sample.token_ids) for sample in trial.case.samples}
    if len(lengths) > 1:
        for restart, detail in ((False, "positions count padding"), (True, "padding attended to")):
            yield _candidate(trial, "padding", f"left padding, {detail}",
                             Context("pad", restart=restart))  # fmt: skip
    for restart, detail in ((True, "positions restart"), (False, "positions continue")):
        yield _candidate(trial, "packing", f"the sample before is attended to, {detail}",
                         Context("packed", restart=restart))  # fmt: skip


def other_text(trial: Trial) -> Iterator[Candidate]:
    """Yield histories that were tokenized or rendered again, or lost tokens at their ends."""
    for cut in (1, 2, 3):
        yield from _history(
            trial, "template", f"last {cut} tokens of each prompt missing", partial(_shorter, cut)
        )
    yield from _history(trial, "stop_tokens", "tokens that ended earlier turns missing", _stopless)
    directory = trial.case.tokenizer or trial.case.checkpoint
    if not (directory / "tokenizer.json").is_file():
        return
    tokenizer = _tokenizer(directory)

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    yield from _history(
        trial, "retokenized", "history decoded and encoded again",
        lambda ids, _: encoded(tokenizer.decode(ids)),
    )  # fmt: skip
    yield from _history(
        trial, "thinking_dropped", "thinking of earlier turns removed",
        lambda ids, _: encoded(THINKING.sub("", tokenizer.decode(ids))),
    )  # fmt: skip
    yield from _history(
        trial, "special_tokens", "special tokens left out",
        lambda ids, _: encoded(tokenizer.decode(ids, skip_special_tokens=True)),
    )  # fmt: skip


def _shorter(cut: int, ids: Sequence[int], _: Sequence[int]) -> Sequence[int]:
    return ids[:-cut]


def _stopless(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [token for at, token in enumerate(ids) if at + 1 not in ends]


def _history(
    trial: Trial, cause: str, detail: str,
    change: Callable[[Sequence[int], Sequence[int]], Sequence[int]],
) -> Iterator[Candidate]:  # fmt: skip
    """Yield the candidate in which `change` made the ids in front of every turn."""
    turns: list[tuple[int, int, tuple[int, ...]]] = []
    changed = False
    groups = trial.case.groups
    for group in groups:
        if any((sample, turn) == (group.sample, group.turn) for sample, turn, _ in turns):
            continue
        own = trial.case.samples[group.sample].token_ids[: group.start]
        ends = [g.end for g in groups if g.sample == group.sample and g.end <= group.start]
        ids = tuple(change(own, ends))
        changed |= ids != tuple(own)
        turns.append((group.sample, group.turn, ids))
    if changed:
        yield _candidate(trial, cause, detail, Context("replace", turns=tuple(turns)))


def _bos_ids(trial: Trial) -> list[int]:
    directory = trial.case.tokenizer or trial.case.checkpoint
    if not (directory / "tokenizer.json").is_file():
        return []
    token = _tokenizer(directory).bos_token_id
    return [] if token is None else [int(token)]


_tokenizers: dict[Path, Any] = {}


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    if directory not in _tokenizers:
        _tokenizers[directory] = AutoTokenizer.from_pretrained(directory)
    return _tokenizers[directory]


def _several(trial: Trial) -> bool:
    return len(trial.case.samples) > 1


INPUTS = (
    Hypothesis("rows of logits", PASS, lambda _: True, rows),
    Hypothesis("beginning of the sequence", PASS, lambda _: True, beginning),
    Hypothesis("history", PASS, lambda _: True, other_text),
    Hypothesis("cut context", PASS, lambda _: True, truncated),
    Hypothesis("batch leaks", PASS, _several, batch_leaks),
)
