"""The trainer's side of a weight update: a checkpoint with a probe of the model it was saved from.

    directory = save_checkpoint(model, "/checkpoints/step-7", version="step-7")

For a model prepared by `exact.prepare`, workers must reproduce the probe bit for bit. For any other
model, the fleet measures how close each worker is. That probe is larger and also carries the
logprobs from before the last training step, so that a worker on the old weights is recognised.
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

from lockstep.checkpoint.delta.writer import ANCHOR_EVERY
from lockstep.checkpoint.files import write_whole
from lockstep.checkpoint.manifest import INDEX, PROBE, WEIGHTS, begin, mark_stable, write_manifest
from lockstep.checkpoint.probe import LENGTHS, THOROUGH, Probe, builtin
from lockstep.checkpoint.safetensors_file import TensorFile
from lockstep.engine import exact
from lockstep.engine.forward_pass import ATTENTION_NAME
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.weights.digest import Digester
from lockstep.engine.weights.published import computed_dtype, is_sharded, published_weights
from lockstep.engine.weights.save import SavedFiles, SaveFile, saving_through
from lockstep.engine.weights.save_delta import delta_files
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.ids import check_ids

log = logging.getLogger(__name__)
CANDIDATES, CANDIDATE_TOKENS = 64, 64
GPU_TOKENS = 2048
"""Tokens, with padding, whose logits are on a GPU at once: 2 GB with a vocabulary of 150,000."""
PACKED_TOKENS = 1024
"""The same for packed sequences on a CPU. Packing needs no padding, but it is counted here too."""
Scored = tuple[tuple[int, ...], tuple[float, ...]]
"""A sequence, and the logprob of each of its tokens after the first."""
_last_scores: weakref.WeakKeyDictionary[Any, tuple[Scored, ...]] = weakref.WeakKeyDictionary()
"""The last scores of each model, which become `previous` in its next probe."""


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
    """Write probe.safetensors: this model's logprobs of `sequences`, or of the built-in ones.

    Sequences are added to the built-in ones until they reach every expert. `tolerance` defaults to
    0 for an exact model (see `is_exact`); otherwise the fleet measures it. `previous` is the probe
    of the weights before; it defaults to the last scores of this model (from `remember` or the
    previous probe).

    Raises BadTokenId for ids outside the vocabulary, CheckpointError for a model that computes NaN,
    EngineFailure for a bf16 model whose products would crash this process.
    """
    probe = make_probe(
        model, sequences=sequences, tolerance=tolerance, version=version, adapter=adapter,
        previous=previous,
    )  # fmt: skip
    probe.write(Path(directory) / PROBE)
    return probe


def make_probe(
    model: Any,
    *,
    sequences: Sequence[Sequence[int]] | None = None,
    tolerance: float | None = None,
    version: str | None = None,
    adapter: str | None = None,
    previous: Probe | None = None,
    dtype: torch.dtype | None = None,
) -> Probe:
    """Return the probe that `write_probe` writes, of the weights rounded to `dtype`.

    All ranks of a sharded model call it, as they call the model.
    """
    probe_ids = [list(ids) for ids in (_builtin(model) if sequences is None else sequences)]
    vocab_size = model.config.get_text_config().vocab_size
    for at, ids in enumerate(probe_ids):
        check_ids(ids, vocab_size, f"sequences[{at}]")
    if tolerance is None and is_exact(model):
        tolerance = 0.0
    previous_scores = _last_scores.get(model, ())
    if previous is not None:
        previous_scores = tuple(zip(previous.sequences, previous.logprobs, strict=True))
    scores = _score(model, probe_ids, dtype)
    probe = Probe(
        sequences=tuple(map(tuple, probe_ids)),
        logprobs=tuple(map(tuple, scores)),
        tolerance=tolerance,
        adapter=adapter,
        version=version,
        previous=_previous_logprobs(probe_ids, dict(previous_scores)),
        dtype=str(computed_dtype(model) or model.dtype).removeprefix("torch."),
    )
    _last_scores[model] = tuple(zip(probe.sequences, probe.logprobs, strict=True))
    return probe


def remember(model: Any, *, dtype: torch.dtype | None = None) -> None:
    """Store the current logprobs of the model for the first probe written of it.

    Call it before the first training step, while the fleet serves these weights, so that the fleet
    can measure how close its workers are. Later probes use the scores of the one before. `dtype` is
    the one in which weights will be saved. All ranks of a sharded model call it.
    """
    probe_ids = _builtin(model)
    scores = _score(model, probe_ids, dtype)
    _last_scores[model] = tuple(
        (tuple(i), tuple(s)) for i, s in zip(probe_ids, scores, strict=True)
    )


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
    base: str | Path | None = None,
    anchor_every: int = ANCHOR_EVERY,
) -> Path:
    """Save a transformers model for a fleet: weights, probe, manifest and STABLE marker.

    With `base`, the checkpoint saved before into a directory beside this one, only what changed is
    written: a delta. Every `anchor_every` checkpoints, when a delta would take more than half of
    the bytes, or when the base is broken, the checkpoint is full. Workers read both.

    The probe is written by `write_probe` with its defaults. The manifest holds the digest of every
    tensor, which validation and workers compare with what they read. If the process is killed at
    any point, the directory is rejected by fleets and can be written again. Raises Conflict when
    the directory already holds a checkpoint, BadRequest for a model in slices (see
    `lockstep.sharded`).
    """
    if is_sharded(model):
        raise BadRequest(
            "the ranks of this model hold slices of it: call lockstep.sharded.save_checkpoint on "
            "every rank",
            param="model",
        )
    directory = Path(directory).absolute()
    begin(directory)
    files = SavedFiles()
    delta = delta_files(directory, None if base is None else Path(base), anchor_every)

    def save_through(save_file: SaveFile) -> None:
        with saving_through(save_file):
            model.save_pretrained(directory, max_shard_size=max_shard_size)

    def save() -> dict[str, str]:
        """Write the weights; return the digests of the tensors."""
        if delta is not None:
            save_through(delta.save_file)
            if delta.write(version):
                return dict(delta.tensors)
        save_through(files.save_file)
        _write_index(directory)
        return _digests(directory, files)

    if model.device.type == "cuda":
        # The saver thread uses another CUDA stream: wait until the last training step is computed.
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
            digests = saved.result()
    write_manifest(directory, digests, files.files)
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
    """Save the adapter of a PEFT model for a fleet, as `save_checkpoint` does a whole model.

    The fleet serves it as `name`. Raises Conflict when the directory already holds an adapter.
    """
    directory = Path(directory).absolute()
    begin(directory)
    model.save_pretrained(directory)
    write_probe(model, directory, tolerance=tolerance, version=version, adapter=name)
    write_manifest(directory)
    mark_stable(directory)
    return directory


def cover_experts(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return `sequences` plus random ones, until every expert of every layer has processed a token.

    A probe that never reaches an expert cannot detect that it is stale. Experts that no candidate
    reaches are counted in a warning. A model without experts gets no additions.
    """
    config = model.config.get_text_config()
    probe_ids = [list(ids) for ids in sequences]
    seen = _reached_experts(model, probe_ids)
    # A fixed seed: successive probes of a model must score the same sequences to be compared.
    rng = random.Random(0)
    for _ in range(CANDIDATES if seen is not None else 0):
        if seen is None or bool(seen.all()):
            break
        length = min(CANDIDATE_TOKENS, config.max_position_embeddings)
        ids = [rng.randrange(config.vocab_size) for _ in range(length)]
        reached = _reached_experts(model, [ids])
        if reached is not None and bool((reached & ~seen).any()):
            probe_ids.append(ids)
            seen |= reached
    if seen is not None and not bool(seen.all()):
        log.warning("the probe does not reach %d of %d experts", int((~seen).sum()), seen.numel())
    return probe_ids


def is_exact(model: Any) -> bool:
    """Return whether this model's logprobs equal the engine's bit for bit (see `exact`)."""
    prepared = model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    dtype = computed_dtype(model) or model.dtype
    # On a GPU, `prepare` has already rejected dtypes without exact kernels.
    return bool(prepared and (dtype == torch.float32 or (model.device.type == "cuda"
                                                         and dtype == model.dtype)))  # fmt: skip


def _builtin(model: Any) -> list[list[int]]:
    """Return few sequences when bits are compared, many when differences are measured."""
    config = model.config.get_text_config()
    shape = LENGTHS if is_exact(model) else THOROUGH
    return cover_experts(model, builtin(config.vocab_size, config.max_position_embeddings, shape))


def _previous_logprobs(
    sequences: list[list[int]], previous_scores: dict[tuple[int, ...], tuple[float, ...]]
) -> tuple[tuple[float, ...], ...] | None:
    """Return the previous logprobs of these sequences, NaN where unknown, or None."""
    rows = [previous_scores.get(tuple(ids), (math.nan,) * (len(ids) - 1)) for ids in sequences]
    return tuple(rows) if any(tuple(ids) in previous_scores for ids in sequences) else None


def _score(
    model: Any, sequences: list[list[int]], dtype: torch.dtype | None = None
) -> list[list[float]]:
    """Return the logprobs of each sequence, batched as far as the logits fit in memory.

    A CPU that would have to pad scores one sequence at a time.
    """
    # On a CPU padding costs as much as tokens, so unequal sequences are not batched.
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
    with _evaluation_mode(model, dtype):
        return [row.tolist() for batch in batches for row in exact.token_logprobs(model, batch)]


def _reached_experts(model: Any, sequences: list[list[int]]) -> Tensor | None:
    """Return the experts that the scores depend on, (layers, experts), or None without experts."""
    config = model.config.get_text_config()
    if not getattr(config, "num_experts", 0):
        return None
    reached: Tensor | None = None
    with _evaluation_mode(model):
        for ids in sequences:
            # The prediction after the last token is not scored, so its experts do not count.
            input_ids = torch.tensor([ids[:-1]], device=model.device)
            routers = model(input_ids=input_ids, use_cache=False, output_router_logits=True)
            logits = torch.stack([layer.float().cpu() for layer in routers.router_logits])
            routed = logits.topk(config.num_experts_per_tok, dim=-1).indices
            hit = torch.zeros(logits.shape[0], logits.shape[-1], dtype=torch.bool)
            hit.scatter_(1, routed.flatten(1), True)
            reached = hit if reached is None else reached | hit
    return reached


@contextmanager
def _evaluation_mode(model: Any, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Disable dropout and gradients within the block, and compute with the published weights.

    A bf16 product on a CPU that lists instructions it does not run would kill the process, so this
    is tested first.
    """
    if model.device.type == "cpu" and model.dtype != torch.float32:
        make_bf16_safe()
    training = model.training
    model.eval()
    try:
        with published_weights(model, dtype), torch.no_grad():
            yield
    finally:
        model.train(training)


def _digests(directory: Path, files: SavedFiles) -> dict[str, str]:
    """Return the digest of every tensor. Files that another library wrote are read back."""
    others = (p for p in directory.glob("model*.safetensors") if p.name not in files.files)
    with Digester() as digester:
        for path in sorted(others):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    digester.add(name, file.get_tensor(name))
        return files.tensors | digester.digests()


def _write_index(directory: Path) -> None:
    """Add an index to a single weights file.

    Without one, some loaders read every safetensors file in the directory as weights, including the
    probe.
    """
    if (directory / INDEX).exists():
        return
    file = TensorFile.read(directory / WEIGHTS)
    index = {
        "metadata": {"total_size": sum(entry.end - entry.start for entry in file.entries)},
        "weight_map": {entry.name: WEIGHTS for entry in sorted(file.entries, key=lambda e: e.name)},
    }
    write_whole(directory / INDEX, json.dumps(index, indent=1).encode())
