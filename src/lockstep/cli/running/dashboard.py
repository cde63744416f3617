"""`lockstep dashboard`: open the page of a running gateway in a browser."""

from __future__ import annotations

import asyncio
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lockstep.cli.derived_flags import with_flags
from lockstep.cli.output import print_json
from lockstep.cli.running.control import FleetConnection
from lockstep.http.client.client import HttpClient
from lockstep.running_gateways import find_control_plane
from lockstep.settings import Settings


@with_flags
def dashboard(
    run: Annotated[
        Path | None,
        typer.Option(help="Directory of a training run, whose curves the page then shows."),
    ] = None,
    browser: Annotated[
        bool, typer.Option(help="Open the page; --no-browser only prints its address.")
    ] = True,
    *,
    connection: FleetConnection,
) -> None:
    """Open the live page of a gateway: its fleet, sessions token by token, training and health.

    The printed address logs in once, within five minutes.
    """
    url, token = find_control_plane(connection.url, connection.token_file, Settings.read())
    code = asyncio.run(_login_code(url, token, None if run is None else str(run.resolve())))
    address = f"{url}/dashboard#code={code}"
    if connection.as_json:
        print_json({"url": address})
        return
    sys.stdout.write(f"{address}\n")
    if browser and sys.stdout.isatty():
        webbrowser.open(address)


async def _login_code(url: str, token: str, run: str | None) -> str:
    """Attach the run, if one is named, and return a code for one login. Raises the gateway's
    error.
    """
    client = HttpClient(url, api_key=token)
    try:
        if run is not None:
            body = msgspec.json.encode({"directory": run})
            await client.post("/dashboard/run", body)
        made = msgspec.json.decode(await client.post("/dashboard/codes", b"{}"))
    finally:
        await client.close()
    return str(made["code"])
