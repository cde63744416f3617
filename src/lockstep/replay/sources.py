"""Where a recorded run comes from: a run directory of one's own, or a pack of another author."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.chain.records import Chain
from lockstep.models import bundled, model_directory
from lockstep.replay.packing import MODEL, PACK, check_model, read_about, unpack
from lockstep.tokens.errors import BadRequest
from lockstep.train.config import TrainConfig
from lockstep.train.envs.bundled import BUNDLED
from lockstep.train.envs.environment import Environment, load_environment


@dataclass(frozen=True, slots=True)
class RunSource:
    """A recorded run as it may be used here.

    `packed` runs are of another author: their environments are loaded only with `trust_code`, and
    their kept checkpoints are not read. `model` replaces the model of the configuration.
    """

    chain: Chain
    name: str
    packed: bool = False
    trust_code: bool = False
    model: str | None = None
    left_out: tuple[str, ...] = ()

    @property
    def reads_checkpoints(self) -> bool:
        """Whether kept checkpoints may be used: the states beside them are pickles."""
        return not self.packed

    @property
    def model_directory(self) -> Path:
        """The directory of the model that training started from; it need not exist."""
        return model_directory(self.model or self.chain.start["config"]["model"])

    def config(self, record: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of a record, with what is different here."""
        config = TrainConfig.of(record["config"])
        if self.packed:
            if self.model is None and bundled(config.model) is None:
                raise BadRequest(
                    f"{self.name} was packed without its model, {config.model!r}: name a directory "
                    "with it (--model)",
                    param="model",
                )
            teacher = config.teacher.path
            if teacher is not None and bundled(teacher) is None and not self.trust_code:
                raise BadRequest(
                    f"{self.name} learnt from the local teacher {teacher!r}, which is not packed: "
                    "if that directory here is the teacher, allow it with --trust-code",
                    param="teacher.path",
                )
            # A name could be a hub repository, or a directory of this machine.
            config = replace(config, serve=replace(config.serve, tokenizer=None))
        return config if self.model is None else replace(config, model=self.model)

    def environment(self, config: TrainConfig) -> Environment | None:
        """Return the run's environment; None for one whose code may not run here."""
        if self.packed and not self.trust_code and config.env.name not in BUNDLED:
            return None
        return load_environment(config.env.name, config.env.options)


@contextmanager
def open_run(
    run: str | Path, *, model: str | None = None, trust_code: bool = False
) -> Iterator[RunSource]:
    """Open a run directory, or a pack, which is extracted for the block.

    `model` replaces the model that training started from. Raises NotFound without a chain, and
    BadRequest for a pack that is damaged or unsafe.
    """
    path = Path(run)
    if path.is_file():
        with tempfile.TemporaryDirectory(prefix="lockstep-pack-") as scratch:
            unpack(path, Path(scratch))
            yield _packed(Path(scratch), str(path), model, trust_code)
    elif (path / PACK).is_file():
        yield _packed(path, str(path), model, trust_code)
    else:
        yield RunSource(Chain.read(path), str(path), model=model)


def _packed(directory: Path, name: str, model: str | None, trust_code: bool) -> RunSource:
    about, chain = read_about(directory), Chain.read(directory)
    if model is None and (directory / MODEL).is_dir():
        check_model(directory / MODEL)
        model = str(directory / MODEL)
    left_out = tuple(map(str, about.get("left_out", ())))
    return RunSource(chain, name, True, trust_code, model, left_out)
