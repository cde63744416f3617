"""`explain`: from samples and directories to a verdict."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.explain.bundle import write_bundle
from lockstep.explain.case import Case, check_values, select
from lockstep.explain.explainer import Explainer
from lockstep.explain.explanation import Explanation
from lockstep.explain.read_samples import read_samples
from lockstep.explain.scorer import Scorer
from lockstep.explain.server import server_scores
from lockstep.models import model_directory
from lockstep.progress import Progress
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest

TrainerValues = Sequence[float] | str | Path | Callable[[Sequence[Sample]], Any]
LOGITS_VALUES = 64 << 20
"""Values of logits that are in memory for one setting: with a vocabulary of 150,000, about 440
tokens are compared."""
SIBLINGS = 3
"""Earlier checkpoints beside the given one that are tried without being named."""
NUMBERED = re.compile(r"(.*?)(\d+)$")


def explain(
    samples: Sequence[Sample] | str | Path,
    checkpoint: str | Path,
    *,
    others: Sequence[str | Path] | Mapping[str, str | Path] | None = None,
    adapter: str | Path | None = None,
    other_adapters: Sequence[str | Path] = (),
    trainer: TrainerValues | None = None,
    server: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    engine_dtype: str | None = None,
    trainer_dtype: str | None = None,
    tokenizer: str | Path | None = None,
    device: str = "cpu",
    max_tokens: int = 2048,
    max_passes: int = 2000,
    max_requests: int = 32,
    resume: str | Path | None = None,
    bundle: str | Path | None = None,
    progress: bool = False,
) -> Explanation:
    """Name the cause of a difference between the logprobs of samples and those they should have.

        verdict = lockstep.explain("samples.jsonl", "run/step-7", others={"step-6": "run/step-6"})
        print(verdict.sentence)

    `checkpoint` holds the weights that the tokens were labelled with, and `others` weights that an
    engine may have used instead, by version label where it is known; by default earlier checkpoints
    beside it. `trainer` are the trainer's logprobs of all sampled tokens: numbers, a .npy file, a
    function of the samples, or "module:function". With `server`, the live server scores the samples
    too, with at most `max_requests` requests; it is not changed. `engine_dtype` is what the engine
    is meant to compute in, by default the server's own statement, else float32.

    At most `max_tokens` sampled tokens are compared, spread over the samples. `resume` is a
    directory in which results are stored and found again. `bundle` is a zip file to write.

    Raises BadRequest for samples, weights and numbers that do not fit each other, CheckpointError
    for weights that cannot be read, and what the server raises. Blocks: on an event loop, use
    `asyncio.to_thread`.
    """
    directory = model_directory(checkpoint)
    config = ModelConfig.read(directory)
    every = list(read_samples(Path(samples)) if isinstance(samples, str | Path) else samples)
    most = most_tokens(max_tokens, config.vocab_size)
    chosen, indices = select(every, most, config.vocab_size)
    numbers = None if trainer is None else _trainer_values(trainer, every, indices)
    with Progress("Explaining", visible=progress) as bar:
        case = Case(
            samples=chosen,
            checkpoint=directory,
            others=_others(others, directory),
            adapter=None if adapter is None else Path(adapter),
            other_adapters=tuple(Path(path) for path in other_adapters),
            engine_dtype=engine_dtype or "float32",
            trainer_dtype=trainer_dtype,
            trainer=numbers,
            tokenizer=None if tokenizer is None else model_directory(tokenizer),
        )
        scores = None
        if server is not None:
            bar.say("scoring on the server")
            scores = server_scores(
                case, server, model=model, api_key=api_key, most_requests=max_requests
            )
            if engine_dtype is None and scores.dtype is not None:
                case = replace(case, engine_dtype=scores.dtype)
        scorer = Scorer(
            case, device=device, budget=max_passes, memo=None if resume is None else Path(resume)
        )
        verdict = Explainer(case, scorer, scores=scores, say=bar.say).run()
    if len(chosen) < len(every):
        note = f"{len(chosen)} of {len(every)} samples were compared (max_tokens {most})."
        verdict = replace(verdict, notes=(*verdict.notes, note))
    if bundle is not None:
        write_bundle(Path(bundle), case, verdict)
    return verdict


def most_tokens(wanted: int, vocab: int) -> int:
    """Return how many tokens can be compared: the logits of one setting are held in memory."""
    return max(64, min(wanted, LOGITS_VALUES // vocab))


def _others(
    others: Sequence[str | Path] | Mapping[str, str | Path] | None, directory: Path
) -> tuple[tuple[str, Path], ...]:
    if others is None:
        return tuple(("", path) for path in earlier_checkpoints(directory))
    if isinstance(others, Mapping):
        return tuple((label, model_directory(path)) for label, path in others.items())
    return tuple(("", model_directory(path)) for path in others)


def earlier_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints before one whose name ends in a number, newest first."""
    match = NUMBERED.fullmatch(directory.name)
    if match is None:
        return []
    numbered = []
    for path in directory.parent.iterdir() if directory.parent.is_dir() else ():
        other = NUMBERED.fullmatch(path.name)
        earlier = other and other[1] == match[1] and int(other[2]) < int(match[2])
        if other and earlier and (path / "config.json").is_file():
            numbered.append((int(other[2]), path))
    return [path for _, path in sorted(numbered, reverse=True)[:SIBLINGS]]


def _trainer_values(
    trainer: TrainerValues, every: Sequence[Sample], indices: Sequence[int]
) -> list[float]:
    """Return the trainer's logprobs of the sampled tokens of the samples at `indices`."""
    if isinstance(trainer, str) and not trainer.endswith((".npy", ".json")):
        trainer = _function(trainer)
    if callable(trainer):
        returned = trainer([every[at] for at in indices])
        flat = [float(number) for own in returned for number in (own if _is_list(own) else [own])]
        return _fit_to(flat, [every[at] for at in indices])
    if isinstance(trainer, str | Path):
        path = Path(trainer)
        if not path.is_file():
            raise BadRequest(f"trainer: {path} does not exist", param="trainer")
        array = (
            np.load(path, allow_pickle=False)
            if path.suffix == ".npy"
            else np.asarray(json.loads(path.read_bytes()), dtype=np.float64)
        )
        flat = [float(number) for number in np.ravel(array)]
    else:
        flat = [float(number) for number in trainer]
    counts = [sum(sample.sampled_mask) for sample in every]
    if len(flat) != sum(counts):
        raise BadRequest(
            f"the trainer has {len(flat)} logprobs, but the samples have {sum(counts)} sampled "
            "tokens: give one number per sampled token, sample after sample",
            param="trainer",
        )
    starts = np.concatenate([[0], np.cumsum(counts)])
    part = [number for at in indices for number in flat[starts[at] : starts[at + 1]]]
    return _fit_to(part, [every[at] for at in indices])


def _fit_to(flat: list[float], samples: Sequence[Sample]) -> list[float]:
    """Return the numbers of tokens that can be compared: a sampled first token has no context."""
    check_values(flat, "trainer")
    numbers: list[float] = []
    at = 0
    for sample in samples:
        own = flat[at : at + sum(sample.sampled_mask)]
        at += len(own)
        numbers += own[1:] if sample.sampled_mask[0] else own
    return numbers


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__")


def _function(name: str) -> Callable[[Sequence[Sample]], Any]:
    module, _, attribute = name.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(
            f"trainer is {name!r}: expected a .npy file or module:function ({error})",
            param="trainer",
        ) from None
    if not callable(loaded):
        raise BadRequest(f"trainer {name!r} is not a function", param="trainer")
    function: Callable[[Sequence[Sample]], Any] = loaded
    return function
