"""The trainer's side of a weight update: a checkpoint with a probe of the model it was saved from.

    directory = save_checkpoint(model, "/checkpoints/step-7", version="step-7")

With a model that `exact.prepare` has seen, workers must reproduce the probe bit for bit. With any
other, the fleet measures how closely each worker follows: the probe is larger then, and carries the
model's logprobs from before its last step, so that a worker on the old weights is told apart.
"""

from __future__ import annotations

import json
import logging
import math
import random
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lockstep.checkpoint.files import write_whole
from lockstep.checkpoint.manifest import INDEX, PROBE, WEIGHTS, begin, mark_stable, write_manifest
from lockstep.checkpoint.probe import LENGTHS, THOROUGH, Probe, builtin
from lockstep.checkpoint.safetensors_file import TensorFile
from lockstep.engine import exact
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.weights.digest import Digester
from lockstep.engine.weights.save import SavedFiles, saved_by
from lockstep.tokens.ids import check_ids

log = logging.getLogger(__name__)
CANDIDATES, CANDIDATE_TOKENS = 64, 64
GPU_TOKENS = 2048
"""Tokens, with padding, whose logits a GPU holds at once: 2 GB with a vocabulary of 150,000."""
PACKED_TOKENS = 1024
"""The same for a CPU that packs sequences: counted with padding, of which it has none."""
Scored = tuple[tuple[int, ...], tuple[float, ...]]
"""A sequence, and the logprob of each of its tokens after the first."""
_last_scores: weakref.WeakKeyDictionary[Any, tuple[Scored, ...]] = weakref.WeakKeyDictionary()
"""What each model was scored on last, and its logprobs: `previous` of its next probe."""


def write_probe(
    model: Any,
    directory: str | Path,
    *,
    sequences: Sequence[Sequence[int]] | None = None,
    tolerance: float | None = None,
    version: str | None = None,
    adapter: str | None = None,
    previous: Probe | None = None,
) -> Probe:
    """Writes probe.safetensors: this model's logprobs of `sequences`, or of the built-in ones.

    The built-in ones are joined by more where experts would not take part without them.
    `tolerance` is 0 by default for an exact model (see `is_exact`), else it is measured by the
    fleet. `previous` is the probe of the weights before; by default the logprobs of this very model
    when it was scored last (`remember`, or the probe before this).

    Raises BadTokenId for ids outside the vocabulary, CheckpointError for a model that computes NaN,
    EngineFailure for a bf16 model whose products would end this process.
    """
    chosen = [list(ids) for ids in (_builtin(model) if sequences is None else sequences)]
    vocab_size = model.config.get_text_config().vocab_size
    for at, ids in enumerate(chosen):
        check_ids(ids, vocab_size, f"sequences[{at}]")
    if tolerance is None and is_exact(model):
        tolerance = 0.0
    known = _last_scores.get(model, ())
    if previous is not None:
        known = tuple(zip(previous.sequences, previous.logprobs, strict=True))
    scores = _score(model, chosen)
    probe = Probe(
        sequences=tuple(map(tuple, chosen)),
        logprobs=tuple(map(tuple, scores)),
        tolerance=tolerance,
        adapter=adapter,
        version=version,
        previous=_previous(chosen, dict(known)),
        dtype=str(model.dtype).removeprefix("torch."),
    )
    probe.write(Path(directory) / PROBE)
    _last_scores[model] = tuple(zip(probe.sequences, probe.logprobs, strict=True))
    return probe


def remember(model: Any) -> None:
    """Keeps the logprobs that the model has now, for the first probe that is written of it.

    To be called before the first step, while the fleet serves these very weights: so the fleet can
    measure how closely its workers follow. Later probes do so by themselves.
    """
    chosen = _builtin(model)
    scores = _score(model, chosen)
    _last_scores[model] = tuple((tuple(i), tuple(s)) for i, s in zip(chosen, scores, strict=True))


def save_checkpoint(
    model: Any,
    directory: str | Path,
    *,
    probe: bool = True,
    sequences: Sequence[Sequence[int]] | None = None,
    tolerance: float | None = None,
    version: str | None = None,
    previous: Probe | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Saves a transformers model for a fleet: weights, probe, manifest, and STABLE at the very end.

    The probe is that of `write_probe`, with its defaults. The manifest holds the digest of every
    tensor, which validation and workers compare with what they read. Killed at any moment, it
    leaves a directory that fleets refuse, and that can be written again.
    Raises Conflict when the directory holds a checkpoint already.
    """
    directory = Path(directory).absolute()
    begin(directory)
    files = SavedFiles()

    def save() -> None:
        with saved_by(files):
            model.save_pretrained(directory, max_shard_size=max_shard_size)

    if model.device.type == "cuda":
        # Another thread does not know the stream on which the last step may still compute.
        torch.cuda.current_stream(model.device).synchronize()
    with ThreadPoolExecutor(1, thread_name_prefix="save") as saver:
        # The files are written while the probe is computed: both only read the model.
        saved = saver.submit(save)
        try:
            if probe:
                write_probe(
                    model,
                    directory,
                    sequences=sequences,
                    tolerance=tolerance,
                    version=version,
                    previous=previous,
                )
        finally:
            saved.result()
    _index(directory)
    write_manifest(directory, _digests(directory, files), files.files)
    mark_stable(directory)
    return directory


def save_adapter(
    model: Any,
    directory: str | Path,
    *,
    name: str,
    tolerance: float | None = None,
    version: str | None = None,
) -> Path:
    """Saves the adapter of a PEFT model for a fleet, as `save_checkpoint` does a whole model.

    `name` is what the fleet serves it as. Raises Conflict when the directory holds one already.
    """
    directory = Path(directory).absolute()
    begin(directory)
    model.save_pretrained(directory)
    write_probe(model, directory, tolerance=tolerance, version=version, adapter=name)
    write_manifest(directory)
    mark_stable(directory)
    return directory


def covering(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """`sequences`, and random ones until every expert of every layer has worked on a token.

    A probe that never reaches an expert cannot see that it is stale. Experts that no candidate
    reaches are left out, and counted in a warning. Models without experts need no more.
    """
    config = model.config.get_text_config()
    chosen = [list(ids) for ids in sequences]
    seen = _experts(model, chosen)
    rng = random.Random(0)
    for _ in range(CANDIDATES if seen is not None else 0):
        if seen is None or bool(seen.all()):
            break
        length = min(CANDIDATE_TOKENS, config.max_position_embeddings)
        ids = [rng.randrange(config.vocab_size) for _ in range(length)]
        reached = _experts(model, [ids])
        if reached is not None and bool((reached & ~seen).any()):
            chosen.append(ids)
            seen |= reached
    if seen is not None and not bool(seen.all()):
        log.warning("the probe does not reach %d of %d experts", int((~seen).sum()), seen.numel())
    return chosen


def is_exact(model: Any) -> bool:
    """Whether this model's logprobs are the engine's, bit for bit: see `lockstep.engine.exact`."""
    prepared = model.config.get_text_config()._attn_implementation == exact.NAME
    # On a GPU `prepare` has refused a type for which there are no kernels.
    return bool(prepared and (model.device.type == "cuda" or model.dtype == torch.float32))


def _builtin(model: Any) -> list[list[int]]:
    """Few sequences where every bit is compared, many where figures are."""
    config = model.config.get_text_config()
    shape = LENGTHS if is_exact(model) else THOROUGH
    return covering(model, builtin(config.vocab_size, config.max_position_embeddings, shape))


def _previous(
    sequences: list[list[int]], known: dict[tuple[int, ...], tuple[float, ...]]
) -> tuple[tuple[float, ...], ...] | None:
    """The logprobs of these sequences before, NaN where unknown; None where all are unknown."""
    rows = [known.get(tuple(ids), (math.nan,) * (len(ids) - 1)) for ids in sequences]
    return tuple(rows) if any(tuple(ids) in known for ids in sequences) else None


def _score(model: Any, sequences: list[list[int]]) -> list[list[float]]:
    """One sequence at a time on a CPU that would pad them; else as many as memory allows for the
    logits of a large vocabulary."""
    budget = 1 if model.device.type == "cpu" else GPU_TOKENS
    if exact.packs(model):
        budget = PACKED_TOKENS
    batches: list[list[list[int]]] = []
    for ids in sequences:
        last = batches[-1] if batches else None
        if last is None or (len(last) + 1) * max(len(ids), *map(len, last)) > budget:
            batches.append([ids])
        else:
            last.append(ids)
    with _evaluating(model):
        return [row.tolist() for batch in batches for row in exact.token_logprobs(model, batch)]


def _experts(model: Any, sequences: list[list[int]]) -> Tensor | None:
    """Which experts the scores depend on, (layers, experts); None for a model that has none."""
    config = model.config.get_text_config()
    if not getattr(config, "num_experts", 0):
        return None
    reached: Tensor | None = None
    with _evaluating(model):
        for ids in sequences:
            # What follows the last token is not scored, so its experts do not count.
            input_ids = torch.tensor([ids[:-1]], device=model.device)
            routers = model(input_ids=input_ids, use_cache=False, output_router_logits=True)
            logits = torch.stack([layer.float().cpu() for layer in routers.router_logits])
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices
            hit = torch.zeros(logits.shape[0], logits.shape[-1], dtype=torch.bool)
            hit.scatter_(1, chosen.flatten(1), True)
            reached = hit if reached is None else reached | hit
    return reached


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout and gradients, and afterwards as before.

    A bf16 product on a CPU that lists more than it allows ends the process: that is tried first.
    """
    if model.device.type == "cpu" and model.dtype != torch.float32:
        make_bf16_safe()
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _digests(directory: Path, files: SavedFiles) -> dict[str, str]:
    """The digest of every tensor; of files that something else wrote, as it reached the file."""
    others = (p for p in directory.glob("model*.safetensors") if p.name not in files.files)
    with Digester() as digester:
        for path in sorted(others):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    digester.add(name, file.get_tensor(name))
        return files.tensors | digester.digests()


def _index(directory: Path) -> None:
    """Adds an index to a single file: without one, some loaders take every safetensors file in the
    directory for weights, the probe too."""
    if (directory / INDEX).exists():
        return
    file = TensorFile.read(directory / WEIGHTS)
    index = {
        "metadata": {"total_size": sum(entry.end - entry.start for entry in file.entries)},
        "weight_map": {entry.name: WEIGHTS for entry in sorted(file.entries, key=lambda e: e.name)},
    }
    write_whole(directory / INDEX, json.dumps(index, indent=1).encode())
