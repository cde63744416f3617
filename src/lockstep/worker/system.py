"""The worker's system port: POST /engine/<method>, behind a bearer token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.checkpoint.probe import check_size
from lockstep.checkpoint.sources import resolve
from lockstep.checkpoint.stores.fetch import Fetched, local_checkpoint
from lockstep.checkpoint.stores.url import AllowedRoots
from lockstep.checkpoint.tensor_names import EMBEDDING, HEAD, check_names
from lockstep.engine import Engine
from lockstep.engine.weights.broadcast import Broadcast
from lockstep.engine.weights.shared_memory import read_shared
from lockstep.engine.weights.weights import Weights
from lockstep.http.auth import RequestAuth
from lockstep.http.handlers import EXCEPTION_HANDLERS, json_response, require_bearer
from lockstep.http.http_request import read_json, unless_gone
from lockstep.protocol.control import worker as control
from lockstep.protocol.control.generations import Generations
from lockstep.protocol.control.worker import TensorSpec
from lockstep.protocol.json.strict import decode
from lockstep.tokens.errors import (
    BadRequest,
    CheckpointError,
    Conflict,
    LockstepError,
    NotFound,
)
from lockstep.tokens.versions import check_label
from lockstep.worker.data import engine_request_id
from lockstep.worker.prober import Prober
from lockstep.worker.sequence_number import SequenceNumbers

BODY_LIMIT = 64 << 20
Fields = dict[str, Any]
Method = tuple[msgspec.json.Decoder[Any], Callable[[Any], Awaitable[Fields]]]
B = TypeVar("B")


class SystemPlane:
    """Routes of the system port.

    `roots` are the directories and prefixes of stores that weights may be loaded from; empty allows
    any. `hosts` are the
    accepted Host headers; None accepts any. `model` is the name of the model, which no adapter may
    use.
    """

    def __init__(
        self,
        engine: Engine,
        token: str,
        roots: tuple[str | Path, ...] = (),
        *,
        hosts: Iterable[str] | None = None,
        model: str | None = None,
    ) -> None:
        self.engine = engine
        self._token = token
        self._roots = AllowedRoots.of(roots)
        self._groups: dict[str, Broadcast] = {}
        self._prober = Prober(engine)
        self._sequence_numbers = SequenceNumbers()
        self._generations = Generations()
        self._model = model
        self._loading: set[str] = set()
        self._incarnation = secrets.token_hex(8)
        self.methods: dict[str, Method] = {
            "pause_generation": self._method(control.PauseWorker, self.pause),
            "resume_generation": self._method(control.Resume, self.resume),
            "flush_cache": self._method(control.EmptyBody, self.flush),
            "abort_request": self._method(control.Abort, self.abort),
            "update_weights_from_disk": self._method(control.FromDisk, self.update_from_disk),
            "init_weights_update_group": self._method(control.JoinGroup, self.join_group),
            "destroy_weights_update_group": self._method(control.LeaveGroup, self.leave_group),
            "update_weights_from_distributed": self._method(
                control.FromGroup, self.update_from_group
            ),
            "get_weight_version": self._read_method(control.EmptyBody, self.version),
            "load_lora_adapter": self._method(control.LoadLora, self.load_lora),
            "unload_lora_adapter": self._method(control.UnloadLora, self.unload_lora),
            "liveness_probe": self._read_method(control.EmptyBody, self.liveness),
            "stage": self._method(control.Stage, self.stage),
            "commit": self._method(control.Commit, self.commit),
            "rollback": self._method(control.Rollback, self.rollback),
            "probe": self._read_method(control.ProbeRequest, self.probe),
            "weights_digest": self._read_method(control.WeightsDigest, self.weights_digest),
        }
        self.app = Starlette(
            routes=[Route("/engine/{method}", self.dispatch, methods=["POST"])],
            middleware=[Middleware(RequestAuth, hosts=hosts)],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    @staticmethod
    def _read_method(body: type[B], run: Callable[[B], Awaitable[Fields]]) -> Method:
        """Return a read-only method, which any caller with the token may call."""
        return msgspec.json.Decoder(body), run

    def _method(self, body: type[B], run: Callable[[B], Awaitable[Fields]]) -> Method:
        """Return a method that is rejected from a gateway once a later one has been obeyed."""

        # A gateway that lost leadership may still send commands: those of an older generation
        # than the highest obeyed, or of another gateway with the same number, are rejected.
        async def fenced(decoded: Any) -> Fields:
            self._generations.check(decoded.generation, decoded.gateway)
            return await run(decoded)

        return msgspec.json.Decoder(body), fenced

    async def dispatch(self, http: Request) -> Response:
        """Run the method named in the path, for callers with the token."""
        require_bearer(http, self._token)
        name = http.path_params["method"]
        if name not in self.methods:
            raise NotFound(
                f"there is no method {name!r}: expected one of {', '.join(self.methods)}"
            )
        decoder, run = self.methods[name]
        body = await read_json(http, BODY_LIMIT)
        work = run(decode(decoder, body or b"{}"))
        # A proof that its gateway gave up must not delay the next one. Other calls run to their
        # end: a worker must not be left with half of a change.
        fields = await (unless_gone(http, work) if name == "probe" else work)
        return json_response({"status": "ok", **fields})

    # Generation

    async def pause(self, body: control.PauseWorker) -> Fields:
        self._sequence_numbers.check(body.sequence_number)
        await self.engine.pause(body.mode)
        if body.clear_cache:
            await self.engine.flush_cache()
        return {"message": "Engine paused", "mode": body.mode, "clear_cache": body.clear_cache}

    async def resume(self, body: control.Resume) -> Fields:
        """Resume generation. Raises Conflict when the served weights are not the proved ones."""
        self._sequence_numbers.check(body.sequence_number)
        serves = self._serves()
        if body.proved not in (None, serves):
            raise Conflict(
                f"resume of {body.proved!r} as proved was requested, but {serves!r} is served: "
                "nothing was changed",
                param="proved",
            )
        await self.engine.resume()
        return {"message": "Engine resumed"}

    async def flush(self, _: control.EmptyBody) -> Fields:
        return {"message": "Cache flushed", "blocks": await self.engine.flush_cache()}

    async def abort(self, body: control.Abort) -> Fields:
        stopped = await self.engine.abort(engine_request_id(body.request_id))
        return {"request_id": body.request_id, "aborted": stopped}

    async def liveness(self, _: control.EmptyBody) -> Fields:
        """Return counters and what is served, once the engine's thread has responded."""
        await self.engine.ping()
        return {
            "alive": True,
            **self.engine.stats(),
            "adapter_labels": {
                name: adapter.label for name, adapter in self.engine.adapters.items()
            },
            "incarnation": self._incarnation,
            "weights_id": self._weights_id(),
            "serves": self._serves(),
            "generation": self._generations.highest,
            "gateway": self._generations.gateway,
        }

    # Weights

    async def version(self, _: control.EmptyBody) -> Fields:
        return {"version": self.engine.version, "version_declared": True}

    async def stage(self, body: control.Stage) -> Fields:
        """Load weights next to the live ones, from exactly one source."""
        fetched = None
        if body.model_path is not None:
            weights, fetched = await self._stage_directory(body.model_path, body.weight_version)
        else:
            weights = await self._stage_tensors(body)
        fields = {"staged": weights.version, "bytes": weights.nbytes,
                  "version": self.engine.version}  # fmt: skip
        return fields if fetched is None else {**fields, "fetched": asdict(fetched.summary)}

    async def _stage_directory(
        self, reference: str, version: str | None
    ) -> tuple[Weights, Fetched | None]:
        """Stage a directory or what a store has; return what fetching took, for a store."""
        live = self.engine.core.served.weights.digest
        while True:
            async with _local(reference, self._roots, live) as local:
                try:
                    label = version or local.directory.name
                    weights = await self.engine.stage(local.directory, label)
                except CheckpointError:
                    if local.is_complete:
                        raise
                    # The delta alone does not suffice, for example as it is served in another
                    # dtype than it was saved in.
                    live = None
                    continue
                return self._prober.remember_staged(weights), local if local.is_remote else None

    async def _stage_tensors(self, body: control.Stage) -> Weights:
        if body.weight_version is None:
            raise BadRequest(
                "weight_version is missing: only a directory has a name to label weights with",
                param="weight_version",
            )
        if not body.partial:
            self._check_complete(tensor.name for tensor in body.tensors)
        if body.shared_name is not None:
            tensors = read_shared(body.shared_name, body.tensors)
            return self._prober.remember_staged(
                await self.engine.stage_tensors(tensors, body.weight_version)
            )
        return await self._stage_broadcast(body.group_name or "", body.tensors, body.weight_version)

    async def _stage_broadcast(
        self, group_name: str, specs: Sequence[TensorSpec], version: str
    ) -> Weights:
        check_label(version)  # reject a bad label before waiting for tensors
        group = self._group(group_name)
        device = self.engine.options.device
        tensors = await asyncio.to_thread(group.receive, specs, device)
        return self._prober.remember_staged(await self.engine.stage_tensors(tensors, version))

    def _check_complete(self, names: Iterable[str]) -> None:
        """Raise CheckpointError for missing tensors, which would silently keep their old values."""
        layout = self.engine.core.served.layout
        tied = layout.config.tied
        # The engine stores a tied head in the embedding, so either of the two is enough.
        sent = {EMBEDDING if tied and name == HEAD else name for name in names}
        check_names(sent, layout.places, "the update", tied=tied)

    async def commit(self, body: control.Commit) -> Fields:
        """Serve the staged weights. Raises Conflict when others are staged than the body names."""
        staged = self.engine.staged_version
        if body.weight_version not in (None, staged):
            raise Conflict(
                f"commit of {body.weight_version!r} was requested, but {staged!r} is staged"
            )
        # With a proof, only the weights that were probed are committed, whatever their label.
        if body.proved is not None:
            return {"version": await self._prober.commit_proved(body.proved)}
        return {"version": await self.engine.commit()}

    async def rollback(self, body: control.Rollback) -> Fields:
        """Drop the staged weights, or else serve those before the last commit again."""
        # No await between this check and the engine's lock: nothing can change in between.
        if body.weights_id not in (None, self._weights_id()):
            raise Conflict(
                f"rollback of {body.weights_id!r} was requested, but the weights have changed "
                f"since: they are {self._weights_id()!r}",
                param="weights_id",
            )
        return {"version": await self.engine.rollback()}

    async def update_from_disk(self, body: control.FromDisk) -> Fields:
        """Stage and commit a directory at once, without a probe: Dynamo's own method."""
        await self._stage_directory(body.model_path, body.weight_version)
        return {"version": await self.engine.commit(), "version_declared": True}

    async def join_group(self, body: control.JoinGroup) -> Fields:
        if body.group_name in self._groups:
            raise Conflict(f"group {body.group_name!r} exists: destroy it first")
        self._groups[body.group_name] = await asyncio.to_thread(
            Broadcast.join,
            body.master_address,
            body.master_port,
            body.rank,
            body.world_size,
            backend=body.backend,
            seconds=body.timeout_seconds,
        )
        return {"group_name": body.group_name, "rank": body.rank}

    async def leave_group(self, body: control.LeaveGroup) -> Fields:
        self._group(body.group_name)
        del self._groups[body.group_name]
        return {"group_name": body.group_name}

    async def update_from_group(self, body: control.FromGroup) -> Fields:
        sizes = {len(body.names), len(body.dtypes), len(body.shapes)}
        if len(sizes) != 1 or not body.names:
            raise BadRequest(
                f"names, dtypes and shapes have {len(body.names)}, {len(body.dtypes)} and "
                f"{len(body.shapes)} entries: they need one for each tensor, and at least one",
                param="names",
            )
        specs = [
            TensorSpec(name, dtype, tuple(shape))
            for name, shape, dtype in zip(body.names, body.shapes, body.dtypes, strict=True)
        ]
        await self._stage_broadcast(body.group_name, specs, body.weight_version)
        return {"version": await self.engine.commit(), "version_declared": True}

    async def probe(self, body: control.ProbeRequest) -> Fields:
        """Return the logprobs of the sequences, and their distance from the expected ones."""
        try:
            check_size(len(body.token_ids), sum(map(len, body.token_ids)))
        except CheckpointError as error:
            raise BadRequest(error.message, param="token_ids") from None
        if body.logprobs is not None:
            got = [len(row) for row in body.logprobs]
            expected = [len(ids) - 1 for ids in body.token_ids]
            if got != expected:
                raise BadRequest(
                    f"logprobs have lengths {got}, expected {expected}: one for each token after "
                    "the first",
                    param="logprobs",
                )
        scored = await self._prober.score_all(
            body.token_ids, adapter=body.lora_name, staged=body.staged
        )
        response: Fields = {"version": self.engine.version, "logprobs": scored.logprobs}
        if body.staged:
            response["proof"] = scored.weights
        if body.logprobs is not None:
            pairs = zip(scored.logprobs, body.logprobs, strict=True)
            differences = [
                abs(a - b) for row, want in pairs for a, b in zip(row, want, strict=True)
            ]
            worst = max(differences, default=0.0)
            response |= {"max_difference": worst, "passed": worst <= body.tolerance}
        return response

    async def weights_digest(self, body: control.WeightsDigest) -> Fields:
        """Return the digests of the weights as read from their checkpoint, or null if unknown."""
        weights = self._prober.weights(body.staged)
        response: Fields = {
            "version": weights.version,
            "digest": weights.digest,
            "dtype": self.engine.options.dtype,
            "proof": self._prober.name(weights),
        }
        return response | ({"tensors": weights.digests or {}} if body.tensors else {})

    # Adapters

    async def load_lora(self, body: control.LoadLora) -> Fields:
        if not body.load_inplace and body.lora_name in self.engine.adapters:
            raise Conflict(
                f"adapter {body.lora_name!r} is loaded already: set load_inplace to swap it"
            )
        if body.lora_name == self._model:
            raise Conflict(
                f"lora_name is {body.lora_name!r}, which is the name of the model",
                param="lora_name",
            )
        if body.lora_name in self._loading:
            raise Conflict(f"adapter {body.lora_name!r} is being loaded", param="lora_name")
        # Loading awaits a thread: two loads of one name at once would both pass the checks above.
        path = resolve(body.lora_path, self._roots.directories, "lora_path")
        self._loading.add(body.lora_name)
        try:
            swapped = await self.engine.load_adapter(
                body.lora_name, path, body.version, self._roots.directories
            )
        finally:
            self._loading.discard(body.lora_name)
        adapter = self.engine.adapters[body.lora_name]
        version = self.engine.version_of(adapter)
        return {
            "lora_name": body.lora_name,
            "hot_swap": swapped,
            "version": version,
            "label": adapter.label,
        }

    async def unload_lora(self, body: control.UnloadLora) -> Fields:
        await self.engine.unload_adapter(body.lora_name)
        return {"lora_name": body.lora_name}

    # Helpers

    def _serves(self) -> str:
        """Return the name of the live weights, the same that their probe returned."""
        return self._prober.name(self.engine.core.served.weights)

    def _weights_id(self) -> str:
        """Return an id that changes with the live or staged weights and with a restart."""
        epoch = self.engine.core.served.weights.epoch
        return f"{self._incarnation}.{epoch}.{self.engine.staged_version or ''}"

    def _group(self, name: str) -> Broadcast:
        if name not in self._groups:
            raise NotFound(f"there is no weight group {name!r}: init_weights_update_group first")
        return self._groups[name]


@asynccontextmanager
async def _local(reference: str, roots: AllowedRoots, live: str | None) -> AsyncIterator[Fetched]:
    """Hold a checkpoint on this host, as `local_checkpoint` does, without blocking."""
    held = local_checkpoint(reference, roots, "model_path", live=live)
    local = await asyncio.to_thread(held.__enter__)
    try:
        yield local
    except LockstepError as error:
        held.__exit__(type(error), error, error.__traceback__)  # raises it, naming the URL
        raise
    else:
        held.__exit__(None, None, None)
