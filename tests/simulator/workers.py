"""Workers without a model: their scores depend on the weights they hold, and they can fail."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar, cast

import numpy as np

from lockstep.backends.admin import (
    AdminName,
    Broadcaster,
    PauseMode,
    Source,
    StagedScores,
    WorkerView,
)
from lockstep.checkpoint import safetensors_file as tensor_file
from lockstep.tokens.errors import (
    Conflict,
    ContractError,
    EngineFailure,
    LockstepError,
    NotFound,
    Unavailable,
    UnknownModel,
)

T = TypeVar("T")
FIRST = "default"
"""The label of the weights that every worker starts with."""
Kind = Literal[
    "drop", "swallow", "delay", "hang", "hang after", "error", "null", "corrupt",
    "kill", "kill after", "restart", "restart after", "restart before", "restage", "late",
]  # fmt: skip


def write_checkpoint(directory: Path, seed: int) -> Path:
    """A checkpoint of one small tensor; every seed gives other weights."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = np.random.default_rng(seed).standard_normal((256, 8)).astype("<f4")
    tensor_file.write(directory / "model.safetensors", {"model.embed_tokens.weight": rows})
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return directory


def write_adapter(directory: Path, seed: int) -> Path:
    """An adapter of one module; every seed gives other weights."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    shapes = {"A": (2, 8), "B": (8, 2)}
    tensors = {
        f"base_model.model.q_proj.lora_{side}.weight": random.standard_normal(shape).astype("<f4")
        for side, shape in shapes.items()
    }
    tensor_file.write(directory / "adapter_model.safetensors", tensors)
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def contents(directory: Path) -> str:
    """What stands for the weights in a directory."""
    raw = b"".join(path.read_bytes() for path in sorted(directory.glob("*model*.safetensors")))
    return hashlib.sha256(raw).hexdigest()


@cache
def score(token_ids: tuple[int, ...], weights: str, adapter: str | None = None) -> list[float]:
    """Logprobs that nobody gets right who holds other weights."""
    seed = int(hashlib.sha256(f"{weights} {adapter}".encode()).hexdigest()[:8], 16)
    return [-1.0 - ((seed + 7 * token) % 997) / 997 for token in token_ids[1:]]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the n-th call of a method."""

    method: str
    kind: Kind
    number: int = 1
    seconds: float = 0.02


_names = count()
_numbers = count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Weights beside the live ones; no others ever have the same name."""

    version: str
    weights: str
    name: str = field(default_factory=lambda: f"weights {next(_names)}")


class SimulatedWorker:
    """The process: what it holds is lost when it is killed."""

    def __init__(self, name: str, first: str = "first") -> None:
        self.name = name
        self.first = first
        self.starts = 0
        self.fault: Fault | None = None
        self.struck = 0
        self.calls: Counter[str] = Counter()
        self.latency: Callable[[], float] | None = None
        self.start()

    def strike(self, method: str, kind: Kind, number: int = 1) -> None:
        """The n-th call of a method from now on goes wrong."""
        self.calls.clear()
        self.struck, self.fault = 0, Fault(method, kind, number)

    def start(self) -> None:
        self.alive = True
        self.starts += 1
        self.version, self.weights = FIRST, self.first
        self.staged: Staged | None = None
        self.proved: Staged | None = None
        self.serves: Staged | None = None
        self.half = False
        self.ordered = 0
        self.previous: tuple[str, str] | None = None
        self.paused = False
        self.adapters: dict[str, str] = {}

    def kill(self) -> None:
        self.alive = False

    def stage(self, source: Source, version: str) -> None:
        directory = source.path("a simulated worker")
        if directory is None or not directory.is_dir():
            raise NotFound(f"there is no {directory}")
        self.staged, self.previous = Staged(version, contents(directory)), None

    def commit(self, version: str) -> None:
        if self.staged is None or self.staged.version != version:
            raise Conflict(f"commit of {version!r} was requested, but {self.staged} is staged")
        self.previous = self.version, self.weights
        self.version, self.weights = self.staged.version, self.staged.weights
        self.serves = None
        if self.half:
            self.weights, self.half = "half of it", False
        self.staged = None

    def commit_proved(self, version: str, proof: str) -> None:
        proved = self.proved
        if proved is None or proved is not self.staged or proved.name != proof:
            raise Conflict(f"{self.staged} is staged, and {proved} was proved, not {proof}")
        self.commit(version)
        if self.weights is not proved.weights:
            raise EngineFailure(f"other weights than the proved ones are served as {version!r}")
        self.serves = proved

    def resume_proved(self, proof: str, number: int | None) -> None:
        if self.serves is None or self.serves.name != proof:
            raise Conflict(f"{self.serves} is served, not {proof}")
        self.pause(False, number)

    def rollback(self) -> str:
        if self.staged is not None:
            self.staged = None
        elif self.previous is not None:
            (self.version, self.weights), self.previous = self.previous, None
            self.serves = None
        else:
            raise Conflict("there is nothing to roll back to")
        return self.version

    def probe_staged(self, token_ids: Sequence[Sequence[int]]) -> StagedScores:
        if self.staged is None:
            raise Conflict("no weights are staged")
        self.proved = self.staged
        scores = [score(tuple(ids), self.staged.weights) for ids in token_ids]
        return StagedScores(scores, self.staged.name)

    def restage(self) -> None:
        """Somebody else stages other weights under the same label, if there are any staged."""
        if self.staged is not None:
            self.staged = Staged(self.staged.version, "somebody else's")

    def probe(self, token_ids: Sequence[Sequence[int]], adapter: str | None) -> list[list[float]]:
        if adapter is not None and adapter not in self.adapters:
            raise UnknownModel(f"adapter {adapter!r} is not loaded")
        held = None if adapter is None else self.adapters[adapter]
        return [score(tuple(ids), self.weights, held) for ids in token_ids]

    def load(self, name: str, path: Path) -> str:
        if not path.is_dir():
            raise NotFound(f"there is no {path}")
        self.adapters[name] = contents(path)
        return self.adapters[name]

    def unload(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UnknownModel(f"adapter {name!r} is not loaded")

    def pause(self, paused: bool, number: int | None) -> None:
        if number is not None and number < self.ordered:
            raise Conflict(f"number {number} came after {self.ordered}: it is too late")
        self.ordered = number or self.ordered
        self.paused = paused


class SimulatedAdmin:
    """Controls a simulated worker; its `fault` strikes on the way."""

    name: AdminName = "lockstep"

    def __init__(self, worker: SimulatedWorker, *, probes_while_paused: bool = True) -> None:
        self.worker = worker
        self.url = f"http://{worker.name}"
        self.stages = True
        self.probes_while_paused = probes_while_paused
        self._late: set[asyncio.Task[None]] = set()

    async def view(self) -> WorkerView:
        def look() -> WorkerView:
            worker = self.worker
            staged = worker.staged.version if worker.staged else None
            return WorkerView(worker.version, staged, worker.paused, dict(worker.adapters))

        return await self._call("view", look)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        number = self._number()
        await self._call("pause", lambda: self.worker.pause(True, number))

    async def resume(self) -> None:
        number = self._number()
        await self._call("resume", lambda: self.worker.pause(False, number))

    async def flush(self) -> None:
        await self._call("flush", lambda: None)

    async def stage(self, source: Source, version: str) -> None:
        await self._call("stage", lambda: self.worker.stage(source, version))

    async def commit(self, version: str) -> None:
        await self._call("commit", lambda: self.worker.commit(version))

    async def rollback(self) -> str | None:
        return await self._call("rollback", self.worker.rollback)

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        if self.worker.paused and not self.probes_while_paused:
            raise Conflict("a paused worker takes no probe")
        return await self._call("probe", lambda: self.worker.probe(token_ids, adapter))

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        return await self._call("load", lambda: self.worker.load(name, path))

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload", lambda: self.worker.unload(name))

    async def join_group(self, how: Broadcaster) -> None:
        await self._call("join", lambda: None)

    async def close(self) -> None:
        for task in self._late:
            task.cancel()

    def _number(self) -> int | None:
        """The place of a pause or resume among all: vLLM's, which are mute, know no such thing."""
        return next(_numbers) if self.probes_while_paused else None

    async def _call(self, method: str, do: Callable[[], T]) -> T:
        worker = self.worker
        if worker.latency is not None:
            await asyncio.sleep(worker.latency())
        if not worker.alive:
            raise Unavailable(f"{worker.name} cannot be reached")
        worker.calls[method] += 1
        fault = worker.fault
        if fault is None or (fault.method, fault.number) != (method, worker.calls[method]):
            return do()
        worker.struck += 1
        return await self._struck(fault, do)

    async def _struck(self, fault: Fault, do: Callable[[], T]) -> T:
        worker, lost = self.worker, Unavailable(f"{self.worker.name} hung up")
        worker.half = (fault.method, fault.kind) == ("commit", "corrupt")
        if fault.kind in ("swallow", "hang after", "kill after", "restart after", "corrupt"):
            result = do()
        match fault.kind:
            case "delay":
                await asyncio.sleep(fault.seconds)
                return do()
            case "late":
                task = asyncio.create_task(self._do_late(fault.seconds, do))
                self._late.add(task)
                raise lost
            case "hang" | "hang after":
                await asyncio.Event().wait()
            case "error":
                raise EngineFailure("it returned 200, with status error")
            case "null":
                raise ContractError("it returned null")
            case "kill" | "kill after":
                worker.kill()
            case "restart" | "restart after":
                worker.start()
            case "restart before":
                worker.start()
                return do()
            case "restage":
                worker.restage()
                return do()
            case "corrupt":
                return self._corrupted(fault.method, result)
        raise lost

    async def _do_late(self, seconds: float, do: Callable[[], object]) -> None:
        await asyncio.sleep(seconds)
        try:
            do()
        except LockstepError:
            return

    def _corrupted(self, method: str, result: T) -> T:
        """The call seems to have worked; what it left or returned is wrong."""
        worker = self.worker
        if method == "stage" and worker.staged is not None:
            worker.staged = Staged(worker.staged.version, "half of it")
        elif method == "commit":
            return result  # the swap itself took half of it
        elif method == "load":
            worker.adapters = dict.fromkeys(worker.adapters, "half of it")
        elif method == "probe":
            return cast(T, _off(cast(list[list[float]], result)))
        elif method == "probe staged":
            scores = cast(StagedScores, result)
            return cast(T, replace(scores, logprobs=_off(scores.logprobs)))
        else:
            raise ContractError("its response cannot be read")
        return result


class StagedProbeAdmin(SimulatedAdmin):
    """Controls a worker that scores what it has staged and commits just that, as Lockstep's can."""

    async def probe_staged(self, token_ids: Sequence[Sequence[int]]) -> StagedScores:
        return await self._call("probe staged", lambda: self.worker.probe_staged(token_ids))

    async def commit_proved(self, version: str, proof: str) -> None:
        await self._call("commit", lambda: self.worker.commit_proved(version, proof))

    async def resume_proved(self, proof: str) -> None:
        number = self._number()
        await self._call("resume", lambda: self.worker.resume_proved(proof, number))


def _off(scores: list[list[float]]) -> list[list[float]]:
    return [[value - 0.5 for value in row] for row in scores]
