"""The service of one tenant: sessions, and models whose calls run in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Protocol, TypeVar

import msgspec

from lockstep.integrations.tinker.calls.futures import PROTOBUF, Futures, Pending, Result
from lockstep.integrations.tinker.calls.sequencer import Sequencer
from lockstep.integrations.tinker.protocol import json_bodies as bodies
from lockstep.integrations.tinker.protocol.protobuf_messages import (
    ForwardBackwardRequest,
    encode_forward_backward,
)
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.sampling_service import BaseModel, SamplingService, digest_of
from lockstep.integrations.tinker.tinker_store import (
    CheckpointRecord,
    Kind,
    RunRecord,
    SamplerRecord,
    SessionRecord,
    TinkerStore,
    now,
)
from lockstep.integrations.tinker.training.lora_tensors import LoraModel, LoraSettings
from lockstep.integrations.tinker.training.training_chain import TrainingChain
from lockstep.integrations.tinker.training.training_model import TrainingModel
from lockstep.tokens.errors import BadRequest, NotFound, UnsupportedField

log = logging.getLogger(__name__)
T = TypeVar("T")
EPHEMERAL_AGE = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model of a training client, in this process."""

    run: RunRecord
    training: TrainingModel
    calls: Sequencer


class LoraTrainer(Protocol):
    """The trainer that all services of a process share. Only `thread` may use `model`."""

    @property
    def model(self) -> LoraModel: ...

    @property
    def thread(self) -> ThreadPoolExecutor: ...

    def settings(self, config: bodies.LoraConfig) -> LoraSettings:
        """Return the LoRA settings for the request of a client."""
        ...

    async def check_served(self, settings: LoraSettings) -> None:
        """Raise BadRequest for adapters that the workers cannot serve."""
        ...


class TinkerService:
    """The runs of one tenant, and `sampling` from them. Used from one event loop."""

    def __init__(
        self,
        base: BaseModel,
        trainer: LoraTrainer,
        store: TinkerStore,
        samplers: Samplers,
        on_session: Callable[[str], None],
    ) -> None:
        """`on_session` is called with the id of every new session."""
        self.base = base
        self.store = store
        self.futures = Futures()
        self.sampling = SamplingService(base, store, samplers, self.futures)
        self._trainer = trainer
        self._on_session = on_session
        self._models: dict[str, LiveModel] = {}
        self._created: dict[str, tuple[bytes, Pending]] = {}
        store.sweep(EPHEMERAL_AGE)

    async def close(self) -> None:
        """Stop all work. Unsaved weights are lost."""
        for live in self._models.values():
            await live.calls.close()
        await self.futures.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the training thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._trainer.thread, work)

    async def delete(self, path: str) -> None:
        """Delete a checkpoint and unload it from the workers. Raises NotFound."""
        _, directory = self.store.checkpoint(path)
        await self.sampling.samplers.forget(directory)
        self.store.delete(path)

    # Sessions

    def create_session(self, request: bodies.CreateSession) -> SessionRecord:
        record = SessionRecord(
            session_id=str(uuid.uuid4()),
            created=now(),
            tags=request.tags,
            user_metadata=request.user_metadata,
            display_name=request.display_name,
        )
        self.store.put_session(record)
        self._on_session(record.session_id)
        return record

    # Models

    def create_model(self, request: bodies.CreateModel) -> tuple[str, Pending]:
        """Return the id of a new model, and the request that creates it. Repeatable.

        Raises Gone for an unknown session, BadRequest when the id was used for another model, and
        NotFound when the model ended with an earlier process.
        """
        self.store.live_session(request.session_id)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        digest = digest_of(request)
        if model_id in self._created:
            earlier, pending = self._created[model_id]
            if earlier != digest:
                raise BadRequest(f"model {model_id!r} was created with other settings")
            return model_id, pending
        if any(run.model_id == model_id for run in self.store.runs()):
            raise NotFound(self._explain_lost(model_id))

        async def work() -> Result:
            await self._create(model_id, request)
            return Result.of({"model_id": model_id, "type": "create_model"})

        pending = self.futures.start(work)
        self._created[model_id] = digest, pending
        return model_id, pending

    async def _create(self, model_id: str, request: bodies.CreateModel) -> None:
        self.base.check(request.base_model)
        if request.lora_config is None:
            raise UnsupportedField(
                "lora_config is missing: this server trains LoRA adapters only", param="lora_config"
            )
        if (kind := request.optimizer_config.type) != "adamw":
            raise UnsupportedField(
                f"optimizer_config.type is {kind!r}: expected adamw", param="optimizer_config"
            )
        settings = self._trainer.settings(request.lora_config)
        model = self._trainer.model
        training = await self._in_thread(
            lambda: TrainingModel(model, settings, self.base.max_tokens, self.sampling.draws)
        )
        await self._trainer.check_served(settings)
        run = RunRecord(
            model_id=model_id,
            base_model=request.base_model,
            created=now(),
            user_metadata=request.user_metadata,
            **asdict(settings),
        )
        self.store.put_run(run)
        directory = self.store.run_directory(model_id)
        training.chain = await self._in_thread(
            lambda: TrainingChain(directory, self.base.directory, settings)
        )
        self._models[model_id] = LiveModel(run, training, Sequencer(self.futures))

    def live(self, model_id: str) -> LiveModel:
        """Return the model of that id.

        Raises NotFound, with the last checkpoint of a model that ended with an earlier process.
        """
        if model_id in self._models:
            return self._models[model_id]
        self.store.run(model_id)
        raise NotFound(self._explain_lost(model_id), param="model_id")

    def _explain_lost(self, model_id: str) -> str:
        """Return the message for a model that ended with an earlier process."""
        saved = [own for own in self.store.checkpoints(model_id) if own.kind == "weights"]
        rest = "it was never saved: create a new one"
        if saved:
            last = saved[0]
            rest = (
                f"its last saved state is {last.path} (after step {last.steps}, at "
                f"{last.created:%Y-%m-%d %H:%M:%S} UTC), and later steps are lost; continue with "
                f"create_training_client_from_state_with_optimizer({last.path!r})"
            )
        return f"the server was restarted, and model {model_id!r} ended with it; {rest}"

    # Calls of a model, in order

    def forward_backward(self, request: ForwardBackwardRequest) -> Pending:
        """Submit a chunk. Raises NotFound, or BadRequest for a seq_id of another call."""
        live = self.live(request.model_id)

        def compute() -> Result:
            result = live.training.forward_backward(request)
            return Result(encode_forward_backward(result.logprobs, result.metrics), PROTOBUF)

        digest = sha256(repr(request).encode()).digest()
        return live.calls.submit(request.seq_id, digest, lambda: self._in_thread(compute))

    def reject(self, model_id: str | None, seq_id: int | None, *, trains: bool) -> None:
        """Count a call that could not be read, so that the next does not wait for it.

        With `trains` its gradients are missing, and the next optimizer step fails.
        """
        live = self._models.get(model_id or "")
        if live is None or seq_id is None:
            return

        async def work() -> Result:
            if trains:
                live.training.reject(seq_id)
            return Result.of({})

        live.calls.consume(seq_id, work)

    def optim_step(self, request: bodies.OptimStep) -> Pending:
        """Submit an optimizer step. Raises as `forward_backward`."""
        live = self.live(request.model_id)

        def compute() -> Result:
            if request.adam_params is None:
                raise UnsupportedField(
                    "adam_params is missing: AdamW is the only optimizer",
                    param="optimizer_params",
                )
            return Result.of({"metrics": live.training.optim_step(request.adam_params)})

        return live.calls.submit(
            request.seq_id, digest_of(request), lambda: self._in_thread(compute)
        )

    def save_weights(self, request: bodies.SaveWeights) -> Pending:
        """Submit saving a checkpoint. Raises as `forward_backward`."""
        live = self.live(request.model_id)

        async def work() -> Result:
            record = self._record(live, "weights", request.path, request)
            if request.overwrite:
                await self.sampling.samplers.forget(self.store.directory(record))

            def compute() -> Result:
                with self.store.writing(record, overwrite=request.overwrite) as directory:
                    live.training.save(directory)
                return Result.of({"path": record.path, "type": "save_weights"})

            return await self._in_thread(compute)

        return live.calls.submit(request.seq_id, digest_of(request), work)

    def save_weights_external(self, request: bodies.SaveWeightsExternal) -> Pending:
        """Submit saving the adapter as PEFT does, for a download. Raises as `forward_backward`."""
        live = self.live(request.model_id)
        if request.age_encryption_recipients:
            raise UnsupportedField(
                "age_encryption_recipients is not supported: leave it out, and encrypt the files "
                "after the download",
                param="age_encryption_recipients",
            )

        def compute() -> Result:
            record = self._record(live, "external_weights", request.path, request)
            with self.store.writing(record) as directory:
                live.training.tensors.save(directory)
            size = sum(file.stat().st_size for file in self.store.files(record.path))
            saved = {"path": record.path, "size_bytes": size, "type": "save_weights_external"}
            return Result.of(saved)

        return live.calls.submit(
            request.seq_id, digest_of(request), lambda: self._in_thread(compute)
        )

    def load_weights(self, request: bodies.LoadWeights) -> Pending:
        """Submit loading a checkpoint. Raises as `forward_backward`, BadRequest without a model."""
        if request.model_id is None or request.seq_id is None:
            raise BadRequest(
                "model_id or seq_id is missing: create the model first", param="model_id"
            )
        live = self.live(request.model_id)

        def compute() -> Result:
            record, directory = self.store.checkpoint(request.path)
            live.training.load(directory, optimizer=request.optimizer, steps=record.steps)
            return Result.of(
                {"path": request.path, "model_id": live.run.model_id, "type": "load_weights"}
            )

        return live.calls.submit(
            request.seq_id, digest_of(request), lambda: self._in_thread(compute)
        )

    def save_weights_for_sampler(self, request: bodies.SaveWeightsForSampler) -> Pending:
        """Submit saving a sampler. Raises as `forward_backward`."""
        live = self.live(request.model_id)

        def save_named() -> Result:
            record = self._record(live, "sampler_weights", request.path, request)
            with self.store.writing(record) as directory:
                live.training.save_for_sampler(directory, record.name)
            return Result.of({"path": record.path, "type": "save_weights_for_sampler"})

        def save_ephemeral() -> Result:
            number = request.sampling_session_seq_id
            if number is None:
                raise BadRequest("path and sampling_session_seq_id are both missing", param="path")
            session = live.run.model_id.partition(":train:")[0]
            sampler_id = f"{session}:sample:{number}"
            with self.store.writing_ephemeral(sampler_id) as directory:
                live.training.save_for_sampler(directory, f"sampler-{number}")
            self.store.put_sampler(
                SamplerRecord(
                    sampler_id=sampler_id,
                    base_model=live.run.base_model,
                    created=now(),
                    directory=str(self.store.ephemeral(sampler_id)),
                )
            )
            return Result.of(
                {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
            )

        compute = save_ephemeral if request.path is None else save_named
        # A repeated call carries a new sampler number, but must get the first sampler.
        same = msgspec.structs.replace(request, sampling_session_seq_id=None)
        return live.calls.submit(request.seq_id, digest_of(same), lambda: self._in_thread(compute))

    def _record(
        self,
        live: LiveModel,
        kind: Kind,
        name: str | None,
        request: bodies.SaveWeights | bodies.SaveWeightsForSampler | bodies.SaveWeightsExternal,
    ) -> CheckpointRecord:
        name = name or f"step-{live.training.steps}-{secrets.token_hex(3)}"
        if "/" in name:
            raise BadRequest(f"path is {name!r}: expected a name without a slash", param="path")
        seconds = request.ttl_seconds
        return CheckpointRecord(
            model_id=live.run.model_id,
            kind=kind,
            name=name,
            created=now(),
            steps=live.training.steps,
            expires=None if seconds is None else now() + timedelta(seconds=seconds),
            user_metadata=request.user_metadata,
        )
