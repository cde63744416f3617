"""Writes the chain of a run: a record when it starts, for each step, when it resumes and ends."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import time
from typing import Any

import msgspec

from lockstep import __version__
from lockstep.chain.records import ChainWriter, Record, Sign, sha256
from lockstep.chain.signing import load_signer
from lockstep.checkpoint.manifest import sha256_of
from lockstep.engine.numerics.plan import fingerprint
from lockstep.models import bundled
from lockstep.train.config import TrainConfig
from lockstep.train.envs.environment import Environment
from lockstep.train.learning.batch import Clock, RolloutGroup, TrainBatch
from lockstep.train.learning.exactness import Exactness
from lockstep.train.learning.learner import StepOutcome
from lockstep.train.publish import Published
from lockstep.train.records.step_contents import (
    batch_digests,
    encode_groups,
    group_digests,
    sample_digests,
)
from lockstep.train.records.step_metrics import Evaluation
from lockstep.train.records.tensor_digests import Digests, combine

PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The part of a step's record that is known before the step is learnt."""

    file: Mapping[str, Any]
    samples: Mapping[str, Any]
    groups: Mapping[str, Any]


class ChainRecorder:
    """Records one run. Files are written in a thread of their own, beside the step that is learnt.

    `sign` names the PEM file of an ed25519 key that signs every record.
    """

    def __init__(
        self, directory: Path, config: TrainConfig, environment: Environment, sign: Path | None
    ) -> None:
        self._config = config
        self._environment = environment
        signer: Sign | None = None
        self._public_key: str | None = None
        if sign is not None:
            signer, self._public_key = load_signer(sign)
        self._writer = ChainWriter(directory, signer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chain")
        self._updates: list[dict[str, Any]] = []
        self._prepared: Future[_Prepared] | None = None

    def close(self) -> None:
        self._thread.shutdown()

    def start(self, exactness: Exactness, digests: Digests, step: int = 0) -> None:
        """Record what decides the run: configuration, code, model and arithmetic.

        A run that an older version started without a chain starts one at the step it resumes from.
        """
        key = {} if self._public_key is None else {"public_key": self._public_key}
        self._writer.append(
            "start", step,
            format="lockstep-chain-1", time=time(), **key,
            config=self._config.to_dict(),
            code=code_version(self._environment),
            model=model_files(self._config.model),
            arithmetic={**exactness.to_json(), "machine": fingerprint()},
            tensors=self._write_tensors(step, digests),
        )  # fmt: skip

    def resume(
        self, step: int, exactness: Exactness, changes: Mapping[str, Any], digests: Digests
    ) -> None:
        """Record that the run continues after `step`, and drop later records.

        Their digests stay in the chain: a killed trainer may have recorded a step whose checkpoint
        was lost.
        """
        dropped = self._writer.rewind(step)
        if self._writer.empty:
            self.start(exactness, digests, step)
            return
        self._writer.append(
            "resume", step,
            time=time(), dropped=dropped, changes=changes, config=self._config.to_dict(),
            code=code_version(self._environment),
            arithmetic={**exactness.to_json(), "machine": fingerprint()},
            tensors=combine(digests),
        )  # fmt: skip

    def published(self, published: Published) -> None:
        """Note an update and its proofs for the next record."""
        self._updates.append(
            {
                "step": published.step,
                "label": published.label,
                "workers": dict(published.proofs),
            }
        )

    def prepare(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        batch: TrainBatch,
        clock: Clock,
        played: int,
    ) -> None:
        """Write the file of a step in the background; `played` tasks were sampled until now."""
        clock = Clock(dict(clock.steps))
        self._prepared = self._thread.submit(self._prepare, step, groups, batch, clock, played)

    def _prepare(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        batch: TrainBatch,
        clock: Clock,
        played: int,
    ) -> _Prepared:
        contents = encode_groups(groups, batch, clock, played)
        return _Prepared(
            file=self._writer.write_file(f"step-{step}.json.gz", msgspec.json.encode(contents)),
            samples=sample_digests(groups, clock),
            groups=group_digests(contents),
        )

    def step(
        self,
        step: int,
        batch: TrainBatch,
        late: int,
        max_off_policy: int,
        learnt: tuple[StepOutcome, Digests] | None,
    ) -> Record:
        """Write the record of the step that was prepared; `learnt` is None for a skipped one.

        `late` samples were too old before the batch was made.
        """
        if self._prepared is None:
            raise RuntimeError("step() without prepare()")
        prepared, self._prepared = self._prepared.result(), None
        learning: dict[str, Any] | None = None
        if learnt is not None:
            outcome, digests = learnt
            learning = {
                "metrics": outcome.metrics,
                **combine(digests),
                "tensors": self._write_tensors(step, digests),
            }
        updates, self._updates = self._updates, []
        return self._writer.append(
            "step", step,
            time=time(), updates=updates, now=step - 1, max_off_policy=max_off_policy, late=late,
            **prepared.groups, samples=prepared.samples, file=prepared.file,
            batch=batch_digests(batch, learnt[0].passes if learnt is not None else ()),
            learning=learning,
        )  # fmt: skip

    def end(self, step: int, before: Evaluation | None, after: Evaluation | None) -> None:
        """Record the end of the run, with the proofs of its last update."""
        self._writer.append(
            "end", step,
            time=time(), updates=self._updates, before=msgspec.to_builtins(before),
            after=msgspec.to_builtins(after),
        )  # fmt: skip
        self._updates = []

    def _write_tensors(self, step: int, digests: Digests) -> dict[str, Any]:
        return self._writer.write_file(f"tensors-{step}.json.gz", msgspec.json.encode(digests))


def code_version(environment: Environment | None) -> dict[str, str | None]:
    """Return what identifies the code of a run: versions, and digests of sources.

    `source` covers every module of this package, `environment` the module of the environment.
    """
    sources = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    try:
        file = inspect.getsourcefile(type(environment))
    except TypeError:  # a class of an interactive session has none
        file = None
    return {
        "lockstep": __version__,
        "source": sha256(sources),
        "environment": None if file is None else sha256(Path(file).read_bytes()),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "peft")},
    }


def model_files(model: str) -> dict[str, str]:
    """Return the SHA-256 of every file of the model that training starts from."""
    directory = bundled(model) or Path(model)
    return {
        path.name: sha256_of(path)
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix not in (".md", ".py")
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
