"""A trainer attached to a gateway: the Tinker API on its data port, samplers on its fleet."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from starlette.routing import Route

from lockstep.engine import exact
from lockstep.engine.config import ModelConfig
from lockstep.engine.numerics import plan as numerics
from lockstep.engine.options import EngineOptions
from lockstep.fleet.fleet import Fleet
from lockstep.integrations.tinker.options import TrainerOptions
from lockstep.integrations.tinker.protocol import json_bodies as bodies
from lockstep.integrations.tinker.rest_routes import RestRoutes
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.sampling_service import BaseModel
from lockstep.integrations.tinker.tinker_routes import TinkerRoutes
from lockstep.integrations.tinker.tinker_tenants import TinkerTenants
from lockstep.integrations.tinker.training.lora_tensors import LoraModel, LoraSettings
from lockstep.integrations.tinker.training.training_model import TrainingModel
from lockstep.storage.file_lock import FileLock
from lockstep.tokens.errors import BadRequest, LockstepError
from lockstep.tokens.numerics import NumericsPlan

TRIAL_SIZE = 0.05
"""Standard deviation of the B factors of a trial adapter: visible in the logprobs of any layer."""


class AttachedTrainer:
    """A trainer over a fleet: routes for its gateway, and the names of its samplers."""

    def __init__(
        self,
        options: TrainerOptions,
        model: LoraModel,
        plan: NumericsPlan,
        workers: NumericsPlan | None,
        samplers: Samplers,
        state_dir: Path,
    ) -> None:
        """`plan` is the numerics plan of this process, `workers` that of the fleet, if reported."""
        self.options = options
        self.model = model
        self.state_dir = state_dir
        # One thread: the base model applies one adapter at a time, and all models take turns.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-trainer")
        self.note = _why_close(plan, workers)
        model.workers_agree = not self.note
        if workers is None and options.dtype != "float32":
            model.close_tolerance = None
        self._samplers = samplers
        self._trusted = workers is not None
        self._served: set[LoraSettings] = set()
        names = dict.fromkeys((*options.names, Path(options.model).name))
        length = ModelConfig.read(options.directory).max_position
        base = BaseModel(tuple(names), options.directory, length)
        self.tenants = TinkerTenants(base, self, samplers, state_dir)

    @property
    def routes(self) -> list[Route]:
        """The routes of the API."""
        return [*TinkerRoutes(self.tenants).routes, *RestRoutes(self.tenants).routes]

    def settings(self, config: bodies.LoraConfig) -> LoraSettings:
        """Return the LoRA settings for the request of a client."""
        settings = LoraSettings(**msgspec.structs.asdict(config))
        return settings if self.options.train_unembed else replace(settings, train_unembed=False)

    async def check_served(self, settings: LoraSettings) -> None:
        """Raise BadRequest, with a way out, for adapters that the workers cannot serve.

        Embedded workers serve every adapter that can be trained. Others get a trial adapter.
        """
        settings = replace(settings, seed=0)
        if self._trusted or settings in self._served:
            return
        if error := await self._trial(settings):
            way_out = "create the model with other settings, or start the workers for these"
            bare = replace(settings, train_unembed=False)
            if settings.train_unembed and bare.targets and await self._trial(bare) is None:
                way_out = (
                    "create the model with train_unembed=False, or start this server with "
                    "--no-train-unembed, which leaves it out for all clients"
                )
            raise BadRequest(
                f"the workers cannot serve adapters with these settings: {way_out} "
                f"({error.message})",
                param="lora_config",
            )

    async def _trial(self, settings: LoraSettings) -> LockstepError | None:
        """Return the error of serving such an adapter; None when the workers proved one."""
        with tempfile.TemporaryDirectory(dir=self.state_dir) as name:
            directory = Path(name)

            def write() -> None:
                training = TrainingModel(self.model, settings, self.tenants.base.max_tokens)
                source = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    for _, b in training.tensors.pairs.values():
                        b.copy_(torch.randn(b.shape, generator=source) * TRIAL_SIZE)
                training.save_for_sampler(directory, "trial")

            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self.thread, write)
                await self._samplers.serve(directory)
                await self._samplers.forget(directory)
            except LockstepError as error:
                return error
        self._served.add(settings)
        return None

    async def close(self) -> None:
        """Stop all work. Unsaved weights are lost."""
        await self.tenants.close()
        self.thread.shutdown(wait=True, cancel_futures=True)
        await self._samplers.close()


def load_model(options: TrainerOptions) -> tuple[LoraModel, NumericsPlan]:
    """Load the base model, prepared for exact arithmetic where possible, with its numerics plan."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    numerics.prepare_process(EngineOptions(device=options.device, dtype=options.dtype))
    torch.set_num_threads(options.threads)
    plan = exact.own_plan(options.directory, device=options.device, dtype=options.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.directory, dtype=getattr(torch, options.dtype)
    )
    model = model.to(options.device).eval()
    if plan.is_exact:
        exact.prepare(model)
    return LoraModel(model, is_exact=plan.is_exact, max_rank=options.max_rank), plan


@asynccontextmanager
async def attached_trainer(
    options: TrainerOptions, fleet: Fleet, state_dir: Path, stop: asyncio.Event
) -> AsyncIterator[AttachedTrainer]:
    """Attach a trainer to a running fleet. Polls of its clients end when `stop` is set.

    Raises BadRequest when another process uses the state directory, and Conflict when the fleet
    serves other weights than those that would be trained on.
    """
    model, plan = await asyncio.to_thread(load_model, options)
    base = next(card for card in await fleet.pool.models() if card.parent is None)
    samplers = Samplers(fleet, base.id, options.slots, labelled=base.numerics is None)
    samplers.check_base()
    with _lock(state_dir):
        trainer = AttachedTrainer(options, model, plan, base.numerics, samplers, state_dir)
        stopping = asyncio.create_task(_end_polls(trainer, stop))
        try:
            await samplers.adopt()
            yield trainer
        finally:
            stopping.cancel()
            await trainer.close()


def _lock(state_dir: Path) -> FileLock:
    state_dir.mkdir(parents=True, exist_ok=True)
    return FileLock(state_dir / "tinker", way_out="stop it, or use another --state-dir")


async def _end_polls(trainer: AttachedTrainer, stop: asyncio.Event) -> None:
    await stop.wait()
    trainer.tenants.end_polls()


def _why_close(trainer: NumericsPlan, workers: NumericsPlan | None) -> str:
    """Return why the logprobs of trainer and samplers may differ; empty if they are equal."""
    if workers is None:
        return "the workers do not report their numerics"
    if not trainer.is_exact:
        return trainer.reason or "the trainer does not compute exactly"
    return trainer.mismatch(workers) or ""
