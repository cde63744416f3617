"""The sampling half of the service: sampling sessions, and samples that run once."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from lockstep.integrations.draws import DrawnRows
from lockstep.integrations.tinker.calls.futures import PROTOBUF, Futures, Pending, Result
from lockstep.integrations.tinker.protocol import json_bodies as bodies
from lockstep.integrations.tinker.protocol.protobuf_messages import encode_samples
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.tinker_store import SCHEME, SamplerRecord, TinkerStore, now
from lockstep.tokens.errors import BadRequest, Busy, NotFound

MAX_SAMPLES = 5000
"""Maximum number of running samples. Beyond it clients get Busy and slow down."""
CLONE = 10**9
"""The seq_ids of clone i of a sampler start at i * CLONE."""
REMEMBERED_SAMPLES = 200_000
"""How many samples are recognized when they are sent again."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that is trained and sampled: its names, directory and context length.

    Its directory is one of its names: a recipe on this machine loads the tokenizer from it.
    """

    names: tuple[str, ...]
    directory: Path
    max_tokens: int

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.names, str(self.directory))

    def check(self, name: str | None) -> None:
        """Raise BadRequest for the name of another model."""
        if name not in self.all_names:
            raise BadRequest(
                f"base_model is {name!r}: this server has {', '.join(self.names)}",
                param="base_model",
            )


class SamplingService:
    """The sampling sessions of one tenant. Used from one event loop."""

    def __init__(
        self,
        base: BaseModel,
        store: TinkerStore,
        samplers: Samplers,
        futures: Futures,
    ) -> None:
        self.samplers = samplers
        self.cache_salt: str | None = None
        """Separates the cached prompts of this tenant from those of others."""
        self.draws = DrawnRows()
        """The sampled rows, by which training recognizes truncated ones."""
        self._records: dict[str, SamplerRecord] = {}
        self._base = base
        self._store = store
        self._futures = futures
        self._samples: dict[tuple[str, int], tuple[bytes, Pending]] = {}
        self._sampling = 0

    def find(self, sampler_id: str) -> SamplerRecord:
        """Return the sampler of that id. Raises NotFound."""
        record = self._records.get(sampler_id)
        if record is None:
            record = self._records[sampler_id] = self._store.sampler(sampler_id)
        return record

    def directory(self, name: str) -> Path | None:
        """Return the weights of a sampler, given its id or the path of its checkpoint.

        None is the base model. Raises NotFound.
        """
        if name.startswith(SCHEME):
            return self._store.checkpoint(name)[1]
        directory = self.find(name).directory
        return None if directory is None else Path(directory)

    def create_sampling_session(self, request: bodies.CreateSamplingSession) -> SamplerRecord:
        """Create a sampler of the base model or of a checkpoint. A repeated request returns it.

        Raises Gone or NotFound for an unknown session or checkpoint, and BadRequest for an id that
        has other weights.
        """
        self._store.live_session(request.session_id)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        directory: Path | None = None
        base = request.base_model
        if request.model_path is not None:
            record, directory = self._store.checkpoint(request.model_path)
            base = base or self._store.run(record.model_id).base_model
        self._base.check(base)
        sampler = SamplerRecord(
            sampler_id=sampler_id,
            base_model=str(base),
            created=now(),
            model_path=request.model_path,
            directory=None if directory is None else str(directory),
        )
        try:
            existing = self.find(sampler_id)
        except NotFound:
            self._store.put_sampler(sampler)
            return sampler
        if existing.model_path != sampler.model_path or existing.directory != sampler.directory:
            raise BadRequest(f"sampling session {sampler_id!r} exists with other weights")
        return existing

    def sample(self, request: bodies.SampleCall) -> Pending:
        """Start a sample. A repeated request returns the same one.

        Raises NotFound, BadRequest for a seq_id that was used for another sample, and Busy when too
        many samples are running.
        """
        sampler_id, seq_id = request.sampling_session_id, request.seq_id
        if sampler_id is None or seq_id is None:
            raise BadRequest(
                "sampling_session_id or seq_id is missing: create a sampling session first",
                param="sampling_session_id",
            )
        sampler = self.find(sampler_id)
        digest = digest_of(request)
        if (sampler_id, seq_id) in self._samples:
            earlier, pending = self._samples[sampler_id, seq_id]
            if earlier != digest:
                raise BadRequest(
                    f"seq_id {seq_id} was used for another sample of this sampler", param="seq_id"
                )
            return pending
        if self._sampling >= MAX_SAMPLES:
            raise Busy(f"{self._sampling} samples are running: send this one later")

        async def work() -> Result:
            self._sampling += 1
            try:
                completions = await self.samplers.sample(
                    sampler, request.prompt_ids(), request.sampling(), self.cache_salt
                )
            finally:
                self._sampling -= 1
            for own in completions:
                self.draws.add(own)
            body = encode_samples(
                completions,
                prompt_logprobs=bool(request.prompt_logprobs),
                last_n=request.prompt_logprobs_last_n,
                prompt_k=request.topk_prompt_logprobs,
                sample_k=request.topk_sample_logprobs,
            )
            return Result(body, PROTOBUF)

        pending = self._futures.start(work, f"{sampler_id}/{seq_id // CLONE}")
        self._samples[sampler_id, seq_id] = digest, pending
        while len(self._samples) > REMEMBERED_SAMPLES:
            del self._samples[next(iter(self._samples))]
        return pending


def digest_of(request: msgspec.Struct) -> bytes:
    """Return a digest that is equal for repeated requests."""
    return sha256(msgspec.json.encode(request)).digest()
