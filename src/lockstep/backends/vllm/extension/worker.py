"""Lockstep inside a vLLM worker: --worker-extension-cls lockstep.backends.vllm.extension.worker.LockstepWorker

Importing it registers the weight transfer backend "lockstep", which the server must be set to use:
--weight-transfer-config '{"backend": "lockstep"}'. The methods are called through /collective_rpc.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from lockstep.backends.vllm.extension.adapter_read_back import read_back_adapter
from lockstep.backends.vllm.extension.backend import NAME, LockstepTransfer, stage_of
from lockstep.backends.vllm.extension.paused_probe import can_probe, score
from lockstep.checkpoint.digest import combined
from lockstep.protocol.common.error_body import error_fields
from lockstep.protocol.control.worker import JoinGroup
from lockstep.tokens.errors import BadRequest, LockstepError, UnsupportedField

Fields = dict[str, Any]
Method = Callable[..., Fields]

if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, LockstepTransfer)


def returns_errors(method: Method) -> Method:
    """Return errors as {"error": {...}}: raised, they would reach the caller as mere text."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Fields:
        try:
            return method(*args, **kwargs)
        except LockstepError as error:
            return error_fields(error)

    return wrapped


class LockstepWorker:
    """Mixin of vLLM's worker class; vllm/collective_rpc.py documents each method."""

    @returns_errors
    def lockstep_view(self) -> Fields:
        weights = _transfer(self).weights
        weights.check_whole()
        _transfer(self).adapter_names.observe(self)
        return {
            "version": weights.version,
            "staged": weights.staged,
            "probes": can_probe(self),
            "digests": True,
            "reads_back": True,
            "generation": _transfer(self).generations.highest,
            "gateway": _transfer(self).generations.gateway,
        }

    @returns_errors
    def lockstep_stage(self, **fields: Any) -> Fields:
        stage, transfer = stage_of(fields), _transfer(self)
        transfer.generations.check(stage.generation, stage.gateway)
        return {"staged": transfer.weights.stage(stage)}

    @returns_errors
    def lockstep_commit(
        self, version: str, generation: int | None = None, gateway: str | None = None
    ) -> Fields:
        _transfer(self).generations.check(generation, gateway)
        weights = _transfer(self).weights
        weights.commit(version)
        _forget_adapters(self)
        return {"version": weights.version}

    @returns_errors
    def lockstep_rollback(
        self,
        version: str | None,
        staged: str | None,
        generation: int | None = None,
        gateway: str | None = None,
    ) -> Fields:
        _transfer(self).generations.check(generation, gateway)
        weights = _transfer(self).weights
        weights.rollback(version, staged)
        if staged is None:
            _forget_adapters(self)
        return {"version": weights.version}

    @returns_errors
    def lockstep_probe(self, token_ids: list[list[int]], adapter: str | None = None) -> Fields:
        _transfer(self).weights.check_whole()
        if adapter is not None or not can_probe(self):
            raise UnsupportedField(
                "while paused, this server cannot score adapters, nor anything on more than one "
                "CPU rank: resume it without traffic to probe it",
                param="adapter",
            )
        return {"logprobs": score(self, token_ids)}

    @returns_errors
    def lockstep_digest(self, staged: bool = False, tensors: bool = False) -> Fields:
        digests = _transfer(self).weights.digests(staged=staged)
        dtype = str(self.model_runner.model_config.dtype)  # type: ignore[attr-defined]
        contents: Fields = {
            "digest": None if digests is None else combined(digests),
            "dtype": dtype.removeprefix("torch."),
        }
        return contents | ({"tensors": dict(digests or {})} if tensors else {})

    @returns_errors
    def lockstep_read_back(self, adapter: str | None = None, path: str = "") -> Fields:
        transfer = _transfer(self)
        transfer.weights.check_whole()
        if adapter is None:
            report = transfer.read_back()
        else:
            report = read_back_adapter(self, transfer.adapter_names, adapter, Path(path))
        fields: Fields = msgspec.to_builtins(report)
        return fields

    @returns_errors
    def lockstep_join_group(self, **fields: Any) -> Fields:
        try:
            request = msgspec.convert(fields, JoinGroup)
        except msgspec.ValidationError as error:
            raise BadRequest(f"the description of the group to join is invalid: {error}") from None
        _transfer(self).generations.check(request.generation, request.gateway)
        _transfer(self).sources.join(request)
        return {"group_name": request.group_name}


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
    """Drop what adapters prepared from the old weights, as vLLM does after its own updates."""
    worker.model_runner.reset_lora_state()
