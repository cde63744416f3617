"""Clients of a gateway under harm: what they were answered, and whether it was true."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch

from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.engine import EngineOptions
from lockstep.engine.core import Core
from lockstep.models import bundled
from lockstep.tokens import VersionSpan
from lockstep.tokens.versions import VersionLabel
from tests.engine import checkpoints
from tests.faults.cluster import ADAPTER
from tests.processes import GENERATE
from tests.worker.adapters import write_adapter

FIRST, LABELS = "default", ("a", "b")
NEAR = 1e-4
"""Checkpoints are 0.1 apart, and close arithmetic 4e-6 from exact: this tells them on any CPU."""
SEQUENCES = ((5, 6, 7, 8, 9, 10, 11, 12), (100, 3, 77, 41, 9))
TIMEOUT = aiohttp.ClientTimeout(total=40)


class Reference:
    """An engine beside the fleet that holds every checkpoint, by its label."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        source = bundled("tiny")
        assert source is not None
        self._core = Core(source, EngineOptions(max_model_len=512, max_seqs=1))
        self.paths = {FIRST: source}
        for seed, name in enumerate(LABELS, start=1):
            self.paths[name] = checkpoints.variant(source, directory / name, seed=seed, scale=1e-2)
        self._weights = {
            name: self._core.served.load_weights(path, name) for name, path in self.paths.items()
        }
        self.adapter = write_adapter(directory / ADAPTER, scale=0.1)
        self._core.served.add_adapter(self._core.served.load_adapter(ADAPTER, self.adapter))
        self.adapter_label = self._core.served.adapter(ADAPTER).label
        for name in LABELS:
            rows = tuple(tuple(self.score(list(ids), name)) for ids in SEQUENCES)
            Probe(SEQUENCES, rows, NEAR).write(self.paths[name] / PROBE)

    def score(self, token_ids: list[int], label: str, adapter: str | None = None) -> list[float]:
        """The logprob of each token after the first."""
        return self._core.score(token_ids, weights=self._weights[label], adapter=adapter)

    def held(self, scores: list[list[float]]) -> str | None:
        """The label of the only checkpoint that scores SEQUENCES like this."""
        labels = [
            name
            for name in self.paths
            if all(
                _near(self.score(list(ids), name), row)
                for ids, row in zip(SEQUENCES, scores, strict=True)
            )
        ]
        return labels[0] if len(labels) == 1 else None

    def wrong(self, answer: Sampled) -> str | None:
        """Why the tokens of an answer are not those of the versions on its label, if so."""
        for span in answer.versions:
            label = VersionLabel.parse(span.version)
            adapter = (None, None) if label.adapter is None else (ADAPTER, self.adapter_label)
            if label.weights not in self._weights or (label.adapter, label.contents) != adapter:
                return f"version {span.version!r} was never given to the fleet"
            scores = self.score(list(answer.token_ids), label.weights, label.adapter)
            for at in range(span.start, span.end):
                if abs(scores[at - 1] - answer.logprobs[at]) > NEAR:
                    return (
                        f"token {at} has logprob {answer.logprobs[at]:.6f} on the label "
                        f"{span.version!r}, whose weights give {scores[at - 1]:.6f}"
                    )
        return None


class Sampled(Protocol):
    """A whole sequence, and under which version its sampled tokens were sampled: a Sample is."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def versions(self) -> Sequence[VersionSpan]: ...


@dataclass(frozen=True)
class Completed:
    token_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]


@dataclass
class Traffic:
    """Requests without a session and conversations with one, for as long as the block runs."""

    url: str
    name: str
    clients: int = 3
    adapted: int = 0
    """How many of the clients ask for the adapter, which the fleet must have loaded."""
    blame_adapters: bool = True
    """Whether a 4xx for the adapter is a violation: not where another gateway unloads it."""
    agents: int = 2
    answers: list[Completed] = field(default_factory=list)
    turns: dict[str, list[list[int]]] = field(default_factory=dict)
    refused: int = 0
    blamed: list[str] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Traffic:
        self._session = aiohttp.ClientSession(
            timeout=TIMEOUT, connector=aiohttp.TCPConnector(force_close=True)
        )
        self._over = asyncio.Event()
        for number in range(self.clients):
            self._tasks.append(asyncio.create_task(self._client(number)))
        for number in range(self.agents):
            self._tasks.append(asyncio.create_task(self._agent(f"{self.name}-{number}")))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Lets what is under way end; what then still runs has hung."""
        self._over.set()
        _, hung = await asyncio.wait(self._tasks, timeout=TIMEOUT.total)
        for task in hung:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self.name} {number}")
        while not self._over.is_set():
            prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(4, 40))]
            body: dict[str, Any] = {
                "token_ids": prompt,
                "sampling_params": {"max_tokens": 24, "temperature": 1.0, "logprobs": 0,
                                    "seed": rng.randrange(1 << 30)},
            }  # fmt: skip
            if number < self.adapted:
                body["model"] = ADAPTER
            read = await self._post(GENERATE, body, {})
            if read is not None:
                if number < self.adapted and not all(
                    VersionLabel.parse(span["version"]).adapter == ADAPTER
                    for span in read["choices"][0]["weight_versions"]
                ):
                    self.blamed.append(f"{ADAPTER} was asked for, and the base answered")
                self.answers.append(_completed(prompt, read["choices"][0]))
            await asyncio.sleep(0.05)

    async def _agent(self, name: str) -> None:
        messages: list[dict[str, Any]] = []
        while not self._over.is_set():
            if len(messages) > 8:
                messages, name = [], name + "+"
            if not messages or messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": f"What is {len(messages)} + 7?"})
            body = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 1.0,
                    "return_token_ids": True, "logprobs": True}  # fmt: skip
            read = await self._post("/v1/chat/completions", body, {"x-session-id": name})
            if read is not None:
                choice = read["choices"][0]
                self.turns.setdefault(name, []).append(choice["token_ids"])
                messages.append({"role": "assistant", "content": choice["message"]["content"]})
            await asyncio.sleep(0.1)

    async def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """The answer; None when there was none, or it said that it failed."""
        try:
            async with self._session.post(self.url + path, json=body, headers=headers) as response:
                read = await response.json()
                if response.status == 200:
                    return dict(read)
                blamable = self.blame_adapters or body.get("model") != ADAPTER
                if response.status < 429 and blamable:  # a client is told that it is its own fault
                    self.blamed.append(f"{path} was refused: {response.status} {read}"[:300])
        except (aiohttp.ClientError, TimeoutError, ValueError):
            pass
        self.refused += 1
        await asyncio.sleep(0.2)
        return None


def lost(turns: Iterable[list[int]], samples: Iterable[Sampled]) -> list[list[int]]:
    """The answered turns whose tokens are in no sample of their session."""
    whole = [list(sample.token_ids) for sample in samples]
    return [turn for turn in turns if not any(_within(turn, one) for one in whole)]


def _within(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


def _completed(prompt: list[int], choice: dict[str, Any]) -> Completed:
    ids = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    spans = tuple(
        VersionSpan(span["version"], span["start"] + len(prompt), span["end"] + len(prompt))
        for span in choice["weight_versions"]
    )
    assert len(logprobs) == len(ids)
    assert sum(span.end - span.start for span in spans) == len(ids)
    return Completed([*prompt, *ids], [0.0] * len(prompt) + logprobs, spans)


def _near(one: list[float], other: list[float]) -> bool:
    return all(abs(a - b) < NEAR for a, b in zip(one, other, strict=True))
