"""One server of the HTTP benchmark, on a port that it prints as JSON.

    python -m benchmarks.http.server lockstep|uvicorn

Plain uvicorn has the same settings as ours: httptools, uvloop, no logs, no headers of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvicorn
import uvloop

from benchmarks.http.app import app
from lockstep.http.server.server import listen, serving


async def main(name: str) -> None:
    with listen("127.0.0.1", 0) as sock:
        print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
        if name == "lockstep":
            async with serving([(app, sock)]):
                await asyncio.Event().wait()
        config = uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            lifespan="off",
            ws="none",
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        await uvicorn.Server(config).serve(sockets=[sock])


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
