"""Self-test of exact arithmetic on this machine, from the engine to the trainer.

    report = selftest.run("tiny")
    for check in report.checks: print(check.name, check.ok, check.detail)

A worker runs the same checks at start, with one difference: its trainer is transformers' forward
pass on the engine's own weights instead of the module, whose import takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.engine import exact
from lockstep.engine.core import Core
from lockstep.engine.numerics.block_shapes import steady_products, threads
from lockstep.engine.options import EngineOptions
from lockstep.models import bundled
from lockstep.tokens.errors import LockstepError
from lockstep.tokens.numerics import NumericsPlan

LENGTHS = (5, 64, 65, 150, 300)
"""Lengths of the compared sequences: below, at and above the block sizes of attention."""
THREADS = (1, 2, 3, 5)


@dataclass(frozen=True, slots=True)
class SelfTestCheck:
    """One comparison of the self-test. `detail` describes the outcome."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """The result of the self-test for one model on this machine."""

    plan: NumericsPlan
    checks: tuple[SelfTestCheck, ...]

    @property
    def exact(self) -> bool:
        """Whether trainer and engine agree bit for bit on this machine."""
        return self.plan.is_exact and all(check.ok for check in self.checks)

    @property
    def problem(self) -> str:
        """The detail of the first failed check, or an empty string."""
        return next((check.detail for check in self.checks if not check.ok), "")


def run(
    model: str | Path = "tiny", options: EngineOptions | None = None, *, module: bool = True
) -> SelfTestReport:
    """Compare an engine, over several chunks and batches, with a trainer, bit for bit.

    With `module` the transformers module after `exact.prepare` is compared too: with and without
    autograd, alone and in a batch, with one and with several threads. Call it before the process
    has computed anything. Raises what an engine raises that cannot load the model.
    """
    directory = bundled(str(model)) or Path(model)
    options = options or EngineOptions(max_seqs=4)
    # With "exact" the engine would raise where it does not hold; "auto" reports the reason.
    lenient = replace(options, arithmetic="auto") if options.arithmetic == "exact" else options
    with threads(options.threads):
        core = Core(directory, lenient)
    detail = core.arithmetic_note or (
        "a sequence has the same bits in any batch, with rows in multiples of "
        f"{core.model.row_multiple}"
    )
    checks = [SelfTestCheck("engine", core.plan.is_exact, detail)]
    if module and core.plan.is_exact:
        checks += _module_checks(core, directory, portable=core.plan.arithmetic == "portable")
    return SelfTestReport(core.plan, tuple(checks))


def _module_checks(core: Core, directory: Path, *, portable: bool) -> Iterator[SelfTestCheck]:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    try:
        exact.prepare(module, portable=portable)
        exact.check_plan(core.plan, exact.own_plan(directory, portable=portable))
    except LockstepError as error:
        yield SelfTestCheck("trainer", False, error.message)
        return
    vocab = core.config.vocab_size
    lengths = sorted({min(length, core.max_len) for length in LENGTHS})
    sequences = [
        [(i * 2654435761 + 97 * length) % vocab for i in range(length)] for length in lengths
    ]
    with threads(core.options.threads), steady_products(core.config.products):
        expected = core.score_all(sequences)
    for team in THREADS:
        for autograd in (False, True):
            with threads(team), torch.set_grad_enabled(autograd):
                alone = [_score(module, [ids])[0] for ids in sequences]
                together = _score(module, sequences)
            yield _compare(
                f"trainer, {team} threads, autograd {'on' if autograd else 'off'}",
                expected, (alone, together),
            )  # fmt: skip


def _score(module: Any, sequences: list[list[int]]) -> list[list[float]]:
    return [logprobs.tolist() for logprobs in exact.token_logprobs(module, sequences)]


def _compare(
    name: str, expected: list[list[float]], runs: Sequence[list[list[float]]]
) -> SelfTestCheck:
    total = sum(map(len, expected))
    gaps = [
        abs(a - b)
        for scores in runs
        for ours, theirs in zip(expected, scores, strict=True)
        for a, b in zip(ours, theirs, strict=True)
        if a != b
    ]
    if not gaps:
        return SelfTestCheck(name, True, f"{total} logprobs equal, alone and in a batch")
    return SelfTestCheck(
        name, False, f"{len(gaps)} of {2 * total} logprobs differ, by up to {max(gaps):.1e}"
    )
