"""The JSON bodies of requests, as SDK 0.36 sends them. An unknown field is an error."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import msgspec

from lockstep.protocol.json.strict import decode
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, UnsupportedField


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of the API. `type` repeats the name of its route."""

    type: str | None = None


B = TypeVar("B", bound=Body)


class CreateSession(Body, frozen=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionId(Body, frozen=True):
    session_id: str


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "adamw"


class CreateModel(Body, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelId(Body, frozen=True):
    model_id: str


class AdamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of one optimizer step, with the defaults of the API."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def check(self) -> None:
        """Raise BadRequest that names a number out of range."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            top = 1.0 if name.startswith("beta") else math.inf
            if not 0 <= value < top:
                raise BadRequest(
                    f"adam_params.{name} is {value}: expected 0 <= {name} < {top:g}",
                    param=f"adam_params.{name}",
                )


class OptimStep(Body, frozen=True):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Body, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(Body, frozen=True):
    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body, frozen=True):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Body, frozen=True):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int] | None = None
    type: str = "encoded_text"


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chunks: list[Chunk]


class SampleParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[int | str] | str | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleCall(Body, frozen=True):
    prompt: Prompt
    sampling_params: SampleParams
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def prompt_ids(self) -> list[int]:
        """Return the tokens of all chunks. Raises UnsupportedField for images and audio."""
        ids: list[int] = []
        for at, chunk in enumerate(self.prompt.chunks):
            if chunk.tokens is None:
                raise UnsupportedField(
                    f"prompt.chunks[{at}] is {chunk.type!r}: only encoded_text is supported",
                    param=f"prompt.chunks[{at}]",
                )
            ids += chunk.tokens
        return ids

    def sampling(self) -> Sampling:
        """Return the options of the engine. Raises BadRequest or UnsupportedField.

        Logprobs are raw, whatever the temperature, as the API's are. `stop` replaces the model's
        end token.
        """
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, name):
                raise UnsupportedField(f"{name} is not supported by this server", param=name)
        params, stop = self.sampling_params, self.sampling_params.stop
        stops = [stop] if isinstance(stop, str) else stop or []
        wants_prompt = self.prompt_logprobs or self.topk_prompt_logprobs
        count = len(self.prompt_ids())
        if self.prompt_logprobs_last_n is not None and not 1 <= self.prompt_logprobs_last_n < count:
            raise BadRequest(
                f"prompt_logprobs_last_n is {self.prompt_logprobs_last_n}: expected 1 to "
                f"{count - 1}",
                param="prompt_logprobs_last_n",
            )
        return Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            seed=params.seed,
            max_tokens=params.max_tokens,
            stop=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            ignore_eos=stop is not None,
            n=self.num_samples,
            logprobs=self.topk_sample_logprobs,
            prompt_logprobs=self.topk_prompt_logprobs if wants_prompt else None,
            logprob_mode="raw",
        )


class RetrieveFuture(Body, frozen=True):
    request_id: str
    allow_metadata_only: bool = False


class FuturesTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sampling_session_id: str
    cloned_sampler_id: int = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFutures(Body, frozen=True):
    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class SamplingSessionId(Body, frozen=True):
    sampling_session_id: str


class TinkerPath(Body, frozen=True):
    tinker_path: str


class Ttl(Body, frozen=True):
    ttl_seconds: int | None = None


class Identity(msgspec.Struct, frozen=True):
    """Model and seq_id of a rejected call."""

    model_id: str | None = None
    seq_id: int | None = None


def read(kind: type[B], body: bytes) -> B:
    """Decode a body. Raises BadRequest that names the wrong field."""
    return decode(msgspec.json.Decoder(kind), body)


def identity_of(body: bytes) -> Identity:
    """Return model and seq_id of a body that may be wrong otherwise."""
    try:
        return msgspec.json.decode(body, type=Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Identity()
