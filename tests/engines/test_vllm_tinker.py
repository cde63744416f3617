"""vLLM as the sampling side of a Tinker trainer: close to it, and nothing that it cannot serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.backends.registry import open_admin
from lockstep.backends.vllm.admin import VllmAdmin
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.integrations.tinker.attached import AttachedTrainer, attached_trainer
from lockstep.integrations.tinker.calls.futures import Pending
from lockstep.integrations.tinker.options import TrainerOptions
from lockstep.integrations.tinker.protocol import json_bodies as bodies
from lockstep.integrations.tinker.protocol.protobuf_messages import (
    Datum,
    ForwardBackwardRequest,
    Tensor,
)
from lockstep.integrations.tinker.tinker_service import TinkerService
from lockstep.tokens import Completion, Sampling
from tests.engine.rig import ids
from tests.engines.vllm_servers import Vllm, updated

pytestmark = pytest.mark.timeout(600)
RANK, SLOTS = 8, 2


@asynccontextmanager
async def training(dense: Vllm, state: Path) -> AsyncIterator[AttachedTrainer]:
    """A trainer of the weights that this vLLM server holds."""
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, f"tinker-{state.name}")
    options = TrainerOptions(model=str(dense.a), slots=SLOTS)
    pool = Pool()
    fleet = Fleet(pool, model_dir=dense.a)
    async with pool, fleet:
        admin = await open_admin(dense.url, backend="vllm")
        assert isinstance(admin, VllmAdmin)
        await admin.check_proved_beside_traffic()
        await fleet.add(dense.url, admin, logprob_mode="raw")
        await pool.wait_ready(1, 60)
        async with attached_trainer(options, fleet, state, asyncio.Event()) as trainer:
            yield trainer


def service_of(trainer: AttachedTrainer) -> TinkerService:
    return trainer.tenants._services["default"]


async def result(service: TinkerService, pending: Pending) -> Any:
    """The result of a call, which has ended well."""
    body = await service.futures.wait(pending.request_id, 120)
    assert body is not None
    assert not body.failed, body.body
    return body


async def create(service: TinkerService, **lora: Any) -> tuple[str, Pending]:
    """A model of a new client, with the head where `lora` does not say otherwise."""
    session = service.create_session(bodies.CreateSession()).session_id
    config = bodies.LoraConfig(**{"rank": RANK, "seed": 1, **lora})
    return service.create_model(
        bodies.CreateModel(
            session_id=session, model_seq_id=0, base_model=service.base.names[0], lora_config=config
        )
    )


def tensor(values: Any) -> Tensor:
    array = np.asarray(values)
    kind = 2 if array.dtype.kind == "i" else 1
    return Tensor(array.astype("<i8" if kind == 2 else "<f4").tobytes(), kind, array.shape)


def datum(tokens: list[int]) -> Datum:
    weights = np.ones(len(tokens) - 1) * 0.1
    inputs = {"target_tokens": tensor(tokens[1:]), "weights": tensor(weights)}
    return Datum(tuple(tokens[:-1]), inputs)


@pytest.mark.failure_mode("F84")
async def test_samples_of_vllm_are_close_to_the_trainer_also_where_samplers_are_evicted(
    dense: Vllm, tmp_path: Path
) -> None:
    async with training(dense, tmp_path / "state") as trainer:
        assert trainer.note == "the workers do not report their numerics"
        service = service_of(trainer)
        model_id, pending = await create(service, train_unembed=False)
        await result(service, pending)
        live, seq, samplers = service.live(model_id), 0, []
        for step in range(SLOTS + 2):
            data = (datum(ids(step, 30)), datum(ids(50 + step, 17)))
            calls = (
                ForwardBackwardRequest(model_id, seq + 1, data, "cross_entropy", {}, False),
                bodies.OptimStep(
                    model_id=model_id, seq_id=seq + 2,
                    adam_params=bodies.AdamParams(learning_rate=1e-2),
                ),
                bodies.SaveWeightsForSampler(
                    model_id=model_id, seq_id=seq + 3, sampling_session_seq_id=step
                ),
            )  # fmt: skip
            await result(service, service.forward_backward(calls[0]))
            await result(service, service.optim_step(calls[1]))
            saved = await result(service, service.save_weights_for_sampler(calls[2]))
            samplers.append(msgspec.json.decode(saved.body)["sampling_session_id"])
            seq += 3

        async def sample(sampler: str, prompt: list[int], **options: Any) -> list[Completion]:
            sampling = Sampling(logprob_mode="raw", **{"max_tokens": 8, **options})
            return await trainer._samplers.sample(service.sampling.find(sampler), prompt, sampling)

        prompt = ids(7, 20)
        drawn = await sample(samplers[-1], prompt, n=4, prompt_logprobs=0, temperature=0.7)
        rows = live.training.forward_backward(
            ForwardBackwardRequest(
                model_id, 99, tuple(datum(prompt + one.token_ids) for one in drawn),
                "cross_entropy", {}, True,
            )
        ).logprobs  # fmt: skip
        off = [
            np.abs(np.asarray([e.logprob for e in one.prompt_logprobs[1:]] + one.logprobs) - row)
            for one, row in zip(drawn, rows, strict=True)
            if one.prompt_logprobs is not None
        ]
        assert len(off) == 4
        assert max(each.max() for each in off) < 1e-3
        # Proofs and scores come beside other requests, which vLLM must survive.
        crowd = [sample(samplers[-1], ids(at, 20 + at), prompt_logprobs=0) for at in range(6)]
        scored = await asyncio.gather(*crowd, *(sample(each, prompt) for each in samplers))
        assert all(one.prompt_logprobs is not None for (one,) in scored[:6])
        # Older ones make room and come back; each is itself.
        first = [(await sample(each, prompt, temperature=0.0))[0].logprobs for each in samplers]
        again = [(await sample(each, prompt, temperature=0.0))[0].logprobs for each in samplers]
        for one, other in zip(first, again, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        assert all(not np.allclose(first[0], other, atol=1e-3) for other in first[1:])
        (stopped,) = await sample(samplers[0], prompt, stop_token_ids=(drawn[0].token_ids[0],))
        assert stopped.finish in ("stop", "length")


async def test_what_vllm_was_not_started_for_is_refused_when_the_model_is_made(
    dense: Vllm, tmp_path: Path
) -> None:
    async with training(dense, tmp_path / "state") as trainer:
        service = service_of(trainer)
        for lora, says in (
            ({"rank": 2 * RANK, "train_unembed": False}, "max_lora_rank 8"),
            ({}, "create the model with train_unembed=False, or start this server with"),
        ):
            _, pending = await create(service, **lora)
            refused = await service.futures.wait(pending.request_id, 120)
            assert refused is not None
            told = msgspec.json.decode(refused.body)
            assert told["category"] == "user"
            assert "the workers cannot serve adapters with these settings" in told["error"]
            assert says in told["error"]
