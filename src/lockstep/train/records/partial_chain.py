"""The chain of a trainer that knows only part of its steps: each record has the links it knows.

`lockstep audit` checks such a chain and lists the links that it lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import msgspec

from lockstep.chain.records import FORMAT, ChainWriter, Record, canonical, sha256
from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.manifest import Manifest
from lockstep.tokens.completion import VersionSpan
from lockstep.train.publish import Published
from lockstep.train.records.chain_recorder import code_version
from lockstep.train.records.step_contents import digest_arrays
from lockstep.train.records.tensor_digests import Digests, combine

DERIVED = ("probe",)
"""Starts of names of files in a checkpoint that hold no weights."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled sequence as its trainer got it. `seed` and `index` say which request drew it."""

    seed: int | None
    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[VersionSpan]


class PartialChain:
    """Writes chain.jsonl of a trainer called `writer` into a directory. Safe in any thread.

    Sequences are digested in the order of their seeds, since that of their arrival means nothing.
    """

    def __init__(self, directory: Path, writer: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._chain = ChainWriter(directory)
        self._writer = writer
        self._drawn: list[Drawn] = []
        self._lock = threading.Lock()

    def start(self, config: Mapping[str, Any], model: Mapping[str, str], **links: Any) -> None:
        """Record what decides the run. `model` has digests of files, if they are known."""
        files = {"model": dict(model)} if model else {}
        self._chain.append(
            "start", 0,
            format=FORMAT, writer=self._writer, time=time(), config=plain(config),
            code=code_version(None), **files, **links,
        )  # fmt: skip

    def note(self, kind: str, step: int, **links: Any) -> None:
        """Record an event between two steps."""
        self._chain.append(kind, step, time=time(), **links)

    def add(self, drawn: Sequence[Drawn]) -> None:
        """Note sequences that the next step learns from."""
        with self._lock:
            self._drawn += drawn

    def step(self, step: int, digests: Digests | None = None, **links: Any) -> Record:
        """Record a step: what was drawn since the last one, digests of tensors, what else is known.

        `links` may have an entry `learning`, to which the digests are added.
        """
        with self._lock:
            drawn, self._drawn = self._drawn, []
        drawn.sort(key=lambda own: (own.seed or 0, own.index, list(own.token_ids)))
        body: dict[str, Any] = dict(links)
        if drawn:
            body["samples"] = _digests(drawn)
            body["seeds"] = sha256(canonical([[own.seed, own.index] for own in drawn]))
        if digests:
            file = self._chain.write_file(f"tensors-{step}.json.gz", msgspec.json.encode(digests))
            learning = {**combine(digests), "tensors": file}
            body["learning"] = {**body.get("learning", {}), **learning}
        return self._chain.append("step", step, time=time(), **body)


def published_links(published: Published) -> dict[str, Any]:
    """Return the links that are known when weights are published: proofs, and their digest."""
    update = {
        "step": published.step,
        "label": published.label,
        "workers": dict(published.proofs),
    }
    manifest = Manifest.read(published.directory)
    if manifest is None:
        return {"updates": [update]}
    files = {
        name: file.sha256
        for name, file in manifest.files.items()
        if name.endswith(".safetensors") and not name.startswith(DERIVED)
    }
    # The manifest of an adapter has no digests of tensors.
    return {
        "updates": [update],
        "learning": {"weights": combined(manifest.tensors or files)},
    }


def plain(value: Any) -> Any:
    """Return a configuration as JSON. A value that JSON does not have is recorded as text."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def _digests(drawn: Sequence[Drawn]) -> dict[str, Any]:
    spans = [[[span.start, span.end, span.version] for span in own.versions] for own in drawn]
    return {
        "count": len(drawn),
        "longest": max(len(own.token_ids) for own in drawn),
        "token_ids": digest_arrays((own.token_ids for own in drawn), "int64"),
        "logprobs": digest_arrays((own.logprobs for own in drawn), "float64"),
        "versions": sha256(canonical(spans)),
    }
