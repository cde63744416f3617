"""Lockstep inside a vLLM worker: --worker-extension-cls lockstep.backends.vllm.extension.worker.LockstepWorker

Importing it registers the weight transfer backend "lockstep", which the server must be told to use:
--weight-transfer-config '{"backend": "lockstep"}'. The methods are called through /collective_rpc.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from lockstep.backends.vllm.extension.backend import NAME, LockstepTransfer, stage_of
from lockstep.backends.vllm.extension.probe import can_probe, score
from lockstep.checkpoint.digest import combined
from lockstep.protocol.common.error_body import error_fields
from lockstep.protocol.control.worker import JoinGroup
from lockstep.tokens.errors import BadRequest, LockstepError, UnsupportedField

Answer = dict[str, Any]
Method = Callable[..., Answer]

if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, LockstepTransfer)


def answering(method: Method) -> Method:
    """Gives errors back as {"error": {...}}: raised, they would reach the caller as mere text."""

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> Answer:
        try:
            return method(*args, **kwargs)
        except LockstepError as error:
            return error_fields(error)

    return answer


class LockstepWorker:
    """What vLLM mixes into its worker class; see admin_vllm_rpc for what each method promises."""

    @answering
    def lockstep_view(self) -> Answer:
        weights = _transfer(self).weights
        weights.check_whole()
        return {
            "version": weights.version,
            "staged": weights.staged,
            "probes": can_probe(self),
            "digests": True,
        }

    @answering
    def lockstep_stage(self, **fields: Any) -> Answer:
        return {"staged": _transfer(self).weights.stage(stage_of(fields))}

    @answering
    def lockstep_commit(self, version: str) -> Answer:
        weights = _transfer(self).weights
        weights.commit(version)
        _forget_adapters(self)
        return {"version": weights.version}

    @answering
    def lockstep_rollback(self, version: str | None, staged: str | None) -> Answer:
        weights = _transfer(self).weights
        weights.rollback(version, staged)
        if staged is None:
            _forget_adapters(self)
        return {"version": weights.version}

    @answering
    def lockstep_probe(self, token_ids: list[list[int]], adapter: str | None = None) -> Answer:
        _transfer(self).weights.check_whole()
        if adapter is not None or not can_probe(self):
            raise UnsupportedField(
                "this server scores adapters, and on more than one CPU rank anything, only while "
                "it is not paused: resume it without traffic to probe it",
                param="adapter",
            )
        return {"logprobs": score(self, token_ids)}

    @answering
    def lockstep_digest(self, staged: bool = False, tensors: bool = False) -> Answer:
        digests = _transfer(self).weights.digests(staged=staged)
        dtype = str(self.model_runner.model_config.dtype)  # type: ignore[attr-defined]
        answer: Answer = {
            "digest": None if digests is None else combined(digests),
            "dtype": dtype.removeprefix("torch."),
        }
        return answer | ({"tensors": dict(digests or {})} if tensors else {})

    @answering
    def lockstep_join_group(self, **fields: Any) -> Answer:
        try:
            ask = msgspec.convert(fields, JoinGroup)
        except msgspec.ValidationError as error:
            raise BadRequest(f"the group to join is not described well: {error}") from None
        _transfer(self).sources.join(ask)
        return {"group_name": ask.group_name}


def _transfer(worker: Any) -> LockstepTransfer:
    transfer = worker.weight_transfer_engine
    if not isinstance(transfer, LockstepTransfer):
        raise UnsupportedField(
            f"the weight transfer engine is {type(transfer).__name__}: start the server with "
            f'--weight-transfer-config \'{{"backend": "{NAME}"}}\'',
            param="weight_transfer_config",
        )
    return transfer


def _forget_adapters(worker: Any) -> None:
    """As vLLM does after its own updates: what adapters had prepared from old weights is void."""
    worker.model_runner.reset_lora_state()
