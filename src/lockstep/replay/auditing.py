"""Audits of a run: its chain and signatures are checked, and chosen steps are repeated."""

from __future__ import annotations

import json
import math
import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any

from lockstep.chain.records import Chain
from lockstep.chain.signing import check_signatures
from lockstep.replay.findings import Replay
from lockstep.replay.replayer import OnStep, replay
from lockstep.replay.sources import RunSource, open_run
from lockstep.replay.verification import chain_problems, checkpoint_problems, missing_links
from lockstep.run_record import AUDITS
from lockstep.tokens.errors import BadRequest


@dataclass(slots=True)
class Audit:
    """The outcome of an audit.

    `problems` say in sentences what does not hold, and `missing` which links the trainer did not
    record, with the number of records. `replay` is None where only the chain was checked.
    """

    run: str
    head: str
    records: int
    steps: int
    fingerprint: str
    public_key: str | None
    key_expected: bool
    problems: list[str]
    missing: dict[str, int]
    fraction: float = 0.0
    seed: int = 0
    chosen: list[int] = field(default_factory=list)
    replay: Replay | None = None

    @property
    def held(self) -> bool:
        """Whether nothing was found that is not as recorded."""
        return not self.problems and (self.replay is None or self.replay.held)

    def to_json(self) -> dict[str, Any]:
        replayed = None if self.replay is None else self.replay.to_json()
        return {**asdict(self), "replay": replayed, "held": self.held}

    def lines(self) -> Iterator[str]:
        """Yield the outcome as sentences for a person."""
        yield (
            f"Audited {self.run}: {self.records} records of {self.steps} steps, head "
            f"{self.head[:16]}, arithmetic {self.fingerprint or 'unknown'}."
        )
        yield self._signature()
        for problem in self.problems:
            yield f"DIFFERS: {problem}"
        if not self.problems:
            yield "The chain holds: records, files and kept checkpoints are as they were written."
        for name, count in self.missing.items():
            yield f"Missing link: {name} (in {count} records)."
        if self.replay is None:
            yield "Nothing was computed again."
            return
        numbers = ", ".join(map(str, self.chosen))
        yield f"Chosen with fraction {self.fraction:g} and seed {self.seed}: steps {numbers}."
        yield from self.replay.lines()

    def _signature(self) -> str:
        if self.public_key is None:
            return "The records are not signed: write access is enough to replace them all."
        key = f"All records are signed by {self.public_key[:16]}"
        if self.key_expected:
            return f"{key}, the expected key."
        return f"{key}, the key that the run itself names; --key says whose it must be."


async def audit(
    run: str | Path,
    *,
    steps: Sequence[int] | None = None,
    fraction: float = 0.1,
    draws: float = 1.0,
    seed: int | None = None,
    chain_only: bool = False,
    key: str | None = None,
    model: str | None = None,
    trust_code: bool = False,
    on_step: OnStep | None = None,
) -> Audit:
    """Check the chain of a run, then repeat a random fraction of its steps and draws.

    `steps` are repeated instead of randomly chosen ones. `draws` is the share of the rollouts of
    these steps that are sampled again. Without `seed`, steps are chosen at random, so that the
    author of a run cannot know which. `key` is the public key in hex that must have signed every
    record. The outcome is added to audits.jsonl of a run directory. Steps are not repeated if the
    chain does not hold.

    Raises BadRequest for a fraction outside of 0 to 1, and where steps cannot be repeated because
    the trainer did not record enough.
    """
    for name, value in (("fraction", fraction), ("draws", draws)):
        if not 0 < value <= 1:
            raise BadRequest(f"{name} is {value:g}: expected more than 0, up to 1", param=name)
    with open_run(run, model=model, trust_code=trust_code) as source:
        outcome = _check(source, key)
    outcome.seed = secrets.randbits(32) if seed is None else seed
    if not chain_only and not outcome.problems:
        outcome.fraction = fraction
        outcome.chosen = sorted(steps or choose_steps(source.chain, fraction, outcome.seed))
        outcome.replay = await replay(
            run, steps=outcome.chosen, fresh_rollouts=True, share_of_draws=draws,
            seed=outcome.seed, model=model, trust_code=trust_code, on_step=on_step,
        )  # fmt: skip
    if not source.packed:
        _keep(outcome, source.chain)
    return outcome


def _check(source: RunSource, key: str | None) -> Audit:
    """Return what can be said without computing."""
    chain = source.chain
    signatures = check_signatures(chain, key)
    if key is not None and "public_key" not in chain.start:
        signatures = [f"the run is not signed, but the key {key[:16]} was expected"]
    problems = [*chain_problems(chain), *signatures]
    if source.reads_checkpoints:
        problems += checkpoint_problems(chain)
    return Audit(
        run=source.name,
        head=chain.head,
        records=len(chain.links),
        steps=len(chain.steps),
        fingerprint=fingerprint_of(chain),
        public_key=chain.start.get("public_key"),
        key_expected=key is not None,
        problems=problems,
        missing=missing_links(chain),
    )


def fingerprint_of(chain: Chain) -> str:
    """Return the fingerprint of the arithmetic that a run was computed with."""
    trainer = chain.start.get("arithmetic", {}).get("trainer") or {}
    return str(trainer.get("fingerprint", ""))


def choose_steps(chain: Chain, fraction: float, seed: int) -> list[int]:
    """Return a fraction of the steps, at least one of them."""
    steps = sorted(chain.steps)
    if not steps:
        raise BadRequest("the run has no recorded step yet", param="run")
    count = max(1, math.ceil(fraction * len(steps)))
    return sorted(random.Random(seed).sample(steps, count))


def _keep(outcome: Audit, chain: Chain) -> None:
    """Add an audit to the run directory, for the report and the dashboard."""
    digests = {link.step: link.digest for link in chain.links if link.kind == "step"}
    differing = {own.step for own in outcome.replay.differences} if outcome.replay else set()
    line = {
        "time": time(),
        "head": outcome.head,
        "held": outcome.held,
        "problems": outcome.problems,
        "mode": outcome.replay.mode if outcome.replay else "chain",
        "steps": [
            {"step": step, "digest": digests[step], "held": step not in differing}
            for step in outcome.chosen
        ],
    }
    with suppress(PermissionError), open(chain.directory / AUDITS, "a") as file:
        file.write(json.dumps(line) + "\n")
