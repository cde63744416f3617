"""Workers with the embedded engine, as child processes of a gateway."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.http.client.client import HttpClient
from lockstep.launch.placement import Placement
from lockstep.launch.start_time import start_seconds
from lockstep.launch.supervisor import Child, Command, Supervisor, worker_names
from lockstep.tokens.errors import LockstepError

HEALTH_SECONDS = 5.0


def embedded_workers(
    model: str,
    count: int,
    *,
    admin_token: str,
    arguments: Sequence[str] = (),
    placement: Placement | None = None,
    drain_seconds: float = 30.0,
    **options: Any,
) -> Supervisor:
    """Return a supervisor of `count` workers of `model`. `arguments` are added to each `lockstep
    worker`; `options` are those of Supervisor. With a `placement`, each worker sees its own GPUs
    only, also after a restart. Raises BadRequest for a count below 1."""
    names, seconds = worker_names(count), start_seconds(model)
    environ = {**os.environ, "LOCKSTEP_ADMIN_TOKEN": admin_token}
    for name in ("LOCKSTEP_API_KEYS", "LOCKSTEP_ADMIN_TOKEN_FILE"):
        environ.pop(name, None)

    def command(child: Child) -> Command:
        port, system_port = (url.rpartition(":")[2] for url in (child.url, child.system_url))
        return Command(
            # -P: do not import modules from the gateway's working directory.
            (sys.executable, "-P", "-m", "lockstep.cli.parent_death", str(os.getpid()),
             "worker", model, "--port", port, "--system-port", system_port,
             "--worker-id", child.id, "--drain-seconds", f"{drain_seconds:g}", *arguments),
            environ if placement is None else environ | placement.environ(names.index(child.id)),
            ready_seconds=seconds,
        )  # fmt: skip

    return Supervisor(names, command, drain_seconds=drain_seconds, healthy=responds, **options)


async def responds(child: Child) -> bool:
    """Return whether a worker answers its health route."""
    client = HttpClient(child.url, retries=0)
    try:
        await client.get("/health", timeout=HEALTH_SECONDS)
    except LockstepError:
        return False
    finally:
        await client.close()
    return True
