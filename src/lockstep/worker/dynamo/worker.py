"""Life cycle of the embedded engine as a worker of an NVIDIA Dynamo deployment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.engine import Engine
from lockstep.http.client.client import HttpClient
from lockstep.http.server.server import run, say_ready, stop_event
from lockstep.models import bundled
from lockstep.protocol.dynamo import environment as dynamo_env
from lockstep.tokens.errors import BadRequest, EngineFailure, Unavailable, UnsupportedField
from lockstep.worker.dynamo.routes import engine_routes
from lockstep.worker.health_report import report_health
from lockstep.worker.options import WorkerOptions
from lockstep.worker.serve import drain
from lockstep.worker.system import SystemPlane

log = logging.getLogger(__name__)
COMPONENT = "backend"
BLOCK = 16
HIGHEST_PORT = 32767
"""Highest system port. Dynamo reads DYN_SYSTEM_PORT as a signed 16-bit number."""
READY_SECONDS = 60.0
GENERATE_ROUTE = "vllm_inference_v1_generate"
"""Setting that lets the frontend serve POST /inference/v1/generate from this worker."""


def run_dynamo_worker(options: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT; print one JSON line on stdout once frontends can find it.

    Environment variables decide where to register (see `dynamo_env`); unset ones get defaults for a
    single machine. Raises UnsupportedField in a Python without Dynamo, and EngineFailure when the
    worker loses its lease.
    """
    if options.port or options.host != "127.0.0.1":
        raise BadRequest(
            f"--host {options.host} --port {options.port}: a Dynamo worker has no data port; "
            "requests arrive through the frontend, and DYN_TCP_RPC_HOST sets its address",
            param="port",
        )
    environ = dynamo_env.complete(os.environ)
    if options.system_port or dynamo_env.SYSTEM_PORT not in environ:
        environ[dynamo_env.SYSTEM_PORT] = str(options.system_port)
    if int(environ[dynamo_env.SYSTEM_PORT]) > HIGHEST_PORT:
        raise BadRequest(
            f"the system port is {environ[dynamo_env.SYSTEM_PORT]}: Dynamo accepts at most "
            f"{HIGHEST_PORT}; use 0 for any free port",
            param="system_port",
        )
    os.environ.update(environ)  # Dynamo's runtime reads os.environ of this process
    try:
        import dynamo.llm
        import dynamo.runtime  # noqa: F401
    except ImportError as error:
        raise UnsupportedField(
            f"--runtime dynamo needs Dynamo in this Python ({error}): install it with "
            "scripts/install-dynamo.sh and run .venv-dynamo/bin/lockstep",
            param="runtime",
        ) from None
    run(_serve(options))


async def _serve(options: WorkerOptions) -> None:
    from dynamo.common.rl import RLRouteRegistry, register_rl_routes
    from dynamo.runtime import DistributedRuntime

    from lockstep.worker.dynamo.data import DynamoData

    name = options.served_name or Path(options.model).name
    root = bundled(options.model) or Path(options.model)
    try:
        runtime = DistributedRuntime(
            asyncio.get_running_loop(),
            os.environ[dynamo_env.DISCOVERY],
            os.environ.get(dynamo_env.REQUEST_PLANE, "tcp"),
        )
    except Exception as error:  # Dynamo raises a bare Exception, also for rejected credentials
        raise EngineFailure(f"Dynamo's runtime did not start: {error}") from None
    place = f"{os.environ.get(dynamo_env.NAMESPACE, 'dynamo')}.{COMPONENT}"
    generate, rl = runtime.endpoint(f"{place}.generate"), runtime.endpoint(f"{place}.rl")
    # The frontend's id of this worker, so that completions name the same one.
    worker = options.engine.worker or str(generate.connection_id())
    engine = Engine(options.model, replace(options.engine, worker=worker))
    data = DynamoData(engine, name, root, return_routed_experts=options.return_routed_experts)
    models = _Models(generate, root, engine.max_model_len)
    system = SystemPlane(engine, "", options.checkpoint_roots, model=name)
    registry = RLRouteRegistry(runtime, world_size=1)
    register_rl_routes(runtime, registry, engine_routes(system, models), enable_dispatch=True)
    async with engine:
        stop = stop_event()
        await models.register(name)
        async with _endpoints(runtime, generate.serve_endpoint(data.serve, graceful_shutdown=True),
                              rl.serve_endpoint(registry.dispatch_stream)):  # fmt: skip
            runtime.set_health_status(True)
            health = asyncio.create_task(report_health(engine, runtime.set_health_status))
            system_url = runtime.system_status_server_url()
            await _wait_until_ready(system_url)
            say_ready(
                runtime="dynamo",
                system_url=system_url,
                model=name,
                pid=os.getpid(),
                instance_id=str(generate.connection_id()),
                store=os.environ.get(dynamo_env.STORE),
                version=engine.version,
                arithmetic=engine.arithmetic,
                numerics=engine.plan.to_json(),
            )
            await stop.wait()
            health.cancel()
            # Unregister before draining, or frontends would send requests that are rejected.
            await models.leave()
            await drain(engine, data, options.drain_seconds)


@contextlib.asynccontextmanager
async def _endpoints(runtime: Any, *serving: Any) -> AsyncIterator[None]:
    """Serve the endpoints within the block. An endpoint that ends earlier raises EngineFailure."""
    tasks = [asyncio.ensure_future(endpoint) for endpoint in serving]
    body = asyncio.current_task()
    failures: list[BaseException] = []

    def on_end(task: asyncio.Future[Any]) -> None:
        if not leaving and body is not None:
            error = None if task.cancelled() else task.exception()
            failures.append(error or EngineFailure("it ended without an error"))
            # The block waits for a signal: cancel it, so that the process exits and restarts.
            body.cancel()

    leaving = False
    for task in tasks:
        task.add_done_callback(on_end)
    try:
        yield
    except asyncio.CancelledError:
        if failures:
            raise EngineFailure(
                f"an endpoint of Dynamo ended ({failures[0]!r}): without its lease in discovery no "
                "frontend finds this worker: restart it"
            ) from None
        raise
    finally:
        leaving = True
        runtime.shutdown()
        await asyncio.wait(tasks, timeout=5.0)


class _Models:
    """The models of this worker, as listed by Dynamo's discovery."""

    def __init__(self, endpoint: Any, root: Path, context_length: int) -> None:
        self._endpoint = endpoint
        self._root = str(root)
        self._context_length = context_length
        self._adapters: set[str] = set()

    async def register(self, name: str, **more: Any) -> None:
        from dynamo.llm import (
            ModelInput,
            ModelRuntimeConfig,
            ModelType,
            WorkerType,
            register_model,
        )

        config = ModelRuntimeConfig()
        config.context_length = self._context_length
        config.set_engine_specific(GENERATE_ROUTE, json.dumps(True))
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            self._endpoint,
            self._root,
            name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=BLOCK,
            runtime_config=config,
            **more,
        )

    async def add(self, name: str) -> None:
        """Register an adapter as a model. Raises EngineFailure when Dynamo rejects the name."""
        try:
            await self.register(name, lora_name=name, base_model_path=self._root)
        except Exception as error:
            raise EngineFailure(f"Dynamo rejected the model {name!r}: {error}") from error
        self._adapters.add(name)

    async def remove(self, name: str) -> None:
        """Unregister an adapter.

        Raises EngineFailure on failure; the name then stays listed, and requests for it get a 404.
        """
        from dynamo.llm import unregister_model

        self._adapters.discard(name)
        try:
            await unregister_model(self._endpoint, lora_name=name)
        except Exception as error:
            raise EngineFailure(f"Dynamo did not unregister model {name!r}: {error}") from error

    async def leave(self) -> None:
        """Unregister the base model and every adapter."""
        from dynamo.llm import unregister_model

        for name in [*self._adapters]:
            await self.remove(name)
        await unregister_model(self._endpoint)


async def _wait_until_ready(system_url: str) -> None:
    """Wait until the runtime reports both endpoints as ready. Raises EngineFailure after 60 s."""
    health = "nothing"
    client = HttpClient(system_url, retries=0)
    try:
        async with asyncio.timeout(READY_SECONDS):
            while True:
                with contextlib.suppress(Unavailable):
                    _, body = await client.exchange("GET", "/health")
                    health = body.decode()
                    states = json.loads(health).get("endpoints", {})
                    if [states.get(n) for n in ("generate", "rl")] == ["ready", "ready"]:
                        return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise EngineFailure(
            f"Dynamo's endpoints were not ready after {READY_SECONDS:g} s: {system_url}/health "
            f"says {health}"
        ) from None
    finally:
        await client.close()
