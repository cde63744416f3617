"""Serves the Tinker API over a fleet: the base model is trained in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from starlette.applications import Starlette
from starlette.types import ASGIApp

from lockstep.engine import exact
from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.numerics import plan as numerics
from lockstep.fleet.control.file_lock import FileLock
from lockstep.fleet.fleet import Fleet
from lockstep.http.auth import FixedKeys, RequestAuth, check_exposure, hosts_of
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.http.server.server import Endpoint, listen, serving, url_of
from lockstep.http.tls import TlsFiles
from lockstep.integrations.tinker.lora import LoraModel
from lockstep.integrations.tinker.rest import RestRoutes
from lockstep.integrations.tinker.routes import TinkerRoutes
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.sampling import BaseModel
from lockstep.integrations.tinker.service import TinkerService
from lockstep.integrations.tinker.store import Store
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.numerics import NumericsPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions:
    """How the server listens, what it serves, and where it keeps what must survive it.

    `names` are further names of the model that clients may use. `slots` is how many adapters each
    worker holds at once, `threads` what training computes with.
    """

    model: str
    state_dir: Path
    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    tls: TlsFiles | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = 1
    slots: int = 32
    max_rank: int = 64
    drain_seconds: float = 5.0

    def check(self) -> None:
        """Raises the error that would keep the server from starting, before anything is started."""
        check_exposure(self.host, bool(self.api_keys), self.insecure)
        ModelConfig.read(self.directory)
        for key in self.api_keys:
            if not key.startswith(("tml-", "eyJ")):
                raise BadRequest(
                    "LOCKSTEP_API_KEYS has a key that does not begin with tml-: clients of Tinker "
                    "refuse to send it",
                    param="api_keys",
                )

    @property
    def directory(self) -> Path:
        """Where the model is. Raises BadRequest when it is nowhere."""
        directory = bundled(self.model) or Path(self.model).resolve()
        if not directory.is_dir():
            raise BadRequest(
                f"model is {self.model!r}: expected a bundled name or a directory", param="model"
            )
        return directory


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that takes requests; `trainer` and `workers` are how the two sides compute."""

    url: str
    model: str
    trainer: NumericsPlan
    workers: NumericsPlan | None

    @property
    def note(self) -> str:
        """Why logprobs of trainer and samplers may differ; empty where they are equal."""
        if self.workers is None:
            return "the workers do not say how they compute"
        if not self.trainer.is_exact:
            return self.trainer.reason or "the trainer does not compute exactly"
        return self.trainer.mismatch(self.workers) or ""


def load_trainer(options: TinkerOptions) -> tuple[LoraModel, NumericsPlan]:
    """The base model for training, made exact where that can be had, and how it computes."""
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
async def tinker_service(
    options: TinkerOptions, fleet: Fleet, model: LoraModel
) -> AsyncIterator[TinkerService]:
    """The service over a fleet that runs. Raises BadRequest when another process has its state."""
    options.state_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(
            FileLock(options.state_dir / "tinker", way_out="stop it, or give another --state-dir")
        )
        store = Store(options.state_dir)
        cards = await fleet.pool.models()
        served = next(card.id for card in cards if card.parent is None)
        names = dict.fromkeys((*options.names, Path(options.model).name))
        length = ModelConfig.read(options.directory).max_position
        base = BaseModel(tuple(names), options.directory, length)
        service = TinkerService(base, model, store, Samplers(fleet, store, served, options.slots))
        try:
            yield service
        finally:
            await service.close()


def tinker_app(service: TinkerService, options: TinkerOptions) -> ASGIApp:
    """The application that answers the API."""
    routes = [*TinkerRoutes(service).routes, *RestRoutes(service).routes]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    return RequestAuth(app, keys=FixedKeys(options.api_keys), hosts=hosts_of(options.host))


async def serve_tinker(
    options: TinkerOptions, fleet: Fleet, on_ready: Callable[[Ready], None], stop: asyncio.Event
) -> None:
    """Serves until `stop` is set. Raises the LockstepError that keeps it from starting."""
    options.check()
    model, plan = await asyncio.to_thread(load_trainer, options)
    with listen(options.host, options.port) as sock:
        cards = await fleet.pool.models()
        workers = next(card.numerics for card in cards if card.parent is None)
        async with tinker_service(options, fleet, model) as service:
            ready = Ready(url_of(sock, options.tls), service.base.names[0], plan, workers)
            model.workers_agree = not ready.note
            endpoint = Endpoint(tinker_app(service, options), sock, options.tls)
            async with serving([endpoint], drain_seconds=options.drain_seconds):
                on_ready(ready)
                await stop.wait()
                service.futures.end_polls()
