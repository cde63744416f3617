"""`lockstep record -- COMMAND`: run an agent in a session, and show what was recorded."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from lockstep.cli.derived_flags import with_flags
from lockstep.cli.output import print_json
from lockstep.cli.running.agent_setup import AgentSetup, SessionAddress, check_context, set_up
from lockstep.cli.running.control import FleetConnection
from lockstep.cli.running.session_summary import session_summary
from lockstep.dashboard.session_view import SessionTree
from lockstep.fleet.remote import RemoteFleet
from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.model_card import ModelCard, decode_models
from lockstep.running_gateways import choose_gateway, find_control_plane
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest, NotFound, Unauthorized

NO_KEY = "none"
"""Sent as the key to a gateway without keys: SDKs demand one."""
SIGNALLED = 128
"""Added to the number of the signal that ended a command, as shells do."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A session that is being recorded. `id` is its name on the control plane, None if only its
    key tells (a caller's own key, whose tenant the gateway knows).
    """

    name: str
    address: SessionAddress
    id: str | None


@with_flags
def record(
    command: Annotated[list[str], typer.Argument(help="The agent and its arguments, after `--`.")],
    session: Annotated[
        str | None,
        typer.Option(help="Session to record into, which may have turns already; by default new."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model that the agent asks for; by default the gateway's base model."),
    ] = None,
    gateway_url: Annotated[
        str | None,
        typer.Option(help="URL of the gateway for agents; by default that of this machine."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="Variable with an API key of the gateway. By default a gateway with keys is asked "
            "for a key of this session only."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the command with its settings.")
    ] = False,
    *,
    connection: FleetConnection,
) -> None:
    """Run an agent on the gateway and record it: set its URL, key and model, run it, show branches.

    Knows Codex, Claude Code, opencode, Qwen Code, mini-swe-agent, aider and cline; other programs
    get the variables that the SDKs of OpenAI and Anthropic read. Exits with the command's code.
    """
    admin_url, token = find_control_plane(connection.url, connection.token_file, Settings.read())
    url = gateway_url or _data_url(admin_url)
    key = None if api_key_env is None else _read_key(api_key_env)
    recording = asyncio.run(_open(url, admin_url, token, session or _new_name(command), model, key))
    setup = set_up(command, recording.address)
    if dry_run:
        sys.stdout.write(f"{setup.shell_text()}\n")
        return
    check_context(setup.agent, recording.address.context)
    console = Console(stderr=True, highlight=False)
    console.print(
        f"recording {escape(setup.agent or command[0])} into session {escape(recording.name)} at "
        f"{escape(url)}",
        soft_wrap=True,
    )
    code = _run(setup)
    asyncio.run(_report(console, recording, setup, admin_url, token, connection.as_json))
    raise typer.Exit(code)


def _data_url(admin_url: str) -> str:
    gateway = choose_gateway(admin_url)
    if gateway is None:
        raise BadRequest(
            f"the gateway at {admin_url} does not run on this machine: give the URL that its "
            "agents use with --gateway-url",
            param="gateway_url",
        )
    return gateway.url


def _read_key(variable: str) -> str:
    if not (key := os.environ.get(variable)):
        raise BadRequest(f"--api-key-env: the variable {variable} is not set", param="api_key_env")
    return key


def _new_name(command: list[str]) -> str:
    program = "".join(c for c in Path(command[0]).name if c.isascii() and c.isalnum())[:40]
    return f"{program or 'run'}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


async def _open(
    url: str, admin_url: str, token: str, name: str, model: str | None, key: str | None
) -> Recording:
    """Return the session for a run. Raises Unauthorized for a key that the gateway does not know,
    Conflict for an existing session at a gateway that demands keys, NotFound for an unknown model.
    """
    session_id: str | None = None if key else name
    try:
        cards = await _models(url, key or NO_KEY)
    except Unauthorized:
        if key is not None:
            raise
        async with RemoteFleet(admin_url, token=token) as fleet:
            minted = await fleet.mint_session(id=name)
        key, session_id = minted.key, minted.id
        cards = await _models(url, key)
    names = [card.id for card in cards]
    card = next((card for card in cards if model in (None, card.id)), None)
    if card is None:
        raise NotFound(f"model is {model!r}: the gateway serves {', '.join(names)}", param="model")
    where = f"{url.rstrip('/')}/sessions/{name}"
    address = SessionAddress(where, key or NO_KEY, card.id, card.max_model_len)
    return Recording(name, address, session_id)


async def _models(url: str, key: str) -> list[ModelCard]:
    client = HttpClient(url, api_key=key)
    try:
        return decode_models(await client.get("/v1/models"))
    finally:
        await client.close()


def _run(setup: AgentSetup) -> int:
    """Run the command in this terminal and return its exit code. Ctrl-C reaches only the command.

    Raises BadRequest when it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-record-") as directory:
        for name, text in setup.files.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = setup.command_in(directory)
        with _interrupts_ignored():
            try:
                process = subprocess.Popen(command, env=setup.environment(os.environ))
            except OSError as error:
                raise BadRequest(
                    f"{command[0]!r} cannot be started: {error.strerror or error}", param="command"
                ) from None
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            code = process.wait()
    return code if code >= 0 else SIGNALLED - code


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    # A handler that does nothing, and not SIG_IGN, which the command would inherit.
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


async def _report(
    console: Console, recording: Recording, setup: AgentSetup, admin_url: str, token: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the branches of the session, its page of the dashboard and the export command."""
    tree = await _read_tree(recording, admin_url, token)
    if tree is None:
        console.print(_why_empty(recording, setup), soft_wrap=True)
        return
    name = tree.row.info.id
    export = f"lockstep export samples {shlex.quote(name)} --output {shlex.quote(name)}.jsonl"
    admin = HttpClient(admin_url, api_key=token)
    try:
        code = msgspec.json.decode(await admin.post("/dashboard/codes", b"{}"))["code"]
    finally:
        await admin.close()
    page = f"{admin_url}/dashboard#code={code}/sessions/{quote(name, safe='')}"
    if as_json:
        fields = ("number", "kind", "parent", "turns", "sampled", "trainable")
        rows = [{field: getattr(row, field) for field in fields} for row in tree.branches]
        breaks = tree.row.breaks
        print_json({"session": name, "branches": rows, "breaks": breaks, "dashboard": page})
        return
    console.print()
    console.print(session_summary(tree))
    console.print(f"\nlook at it   {escape(page)}", soft_wrap=True)
    console.print(f"export it    {escape(export)}", soft_wrap=True)


async def _read_tree(recording: Recording, admin_url: str, token: str) -> SessionTree | None:
    """Return the tree of the session, None if it has no turns."""
    data = HttpClient(recording.address.url, api_key=recording.address.key)
    admin = HttpClient(admin_url, api_key=token)
    try:
        name = recording.id
        if name is None:
            name = msgspec.json.decode(await data.get("/v1/session"))["session"]["id"]
        body = await admin.get(f"/dashboard/data/sessions/{quote(name, safe='')}")
    except NotFound:
        return None
    finally:
        await data.close()
        await admin.close()
    tree = msgspec.json.decode(body, type=SessionTree)
    return tree if tree.turns else None


def _why_empty(recording: Recording, setup: AgentSetup) -> str:
    name = escape(setup.agent or "the command")
    lines = [f"session {escape(recording.name)} has no turns: no request of {name} was answered."]
    if (context := recording.address.context) is not None:
        lines.append(
            f"The model's context is {context:,} tokens: if {name} reports that its prompt is too "
            "long, serve a model with a longer context."
        )
    if setup.agent is None:
        lines.append(
            "A program that does not read OPENAI_BASE_URL or ANTHROPIC_BASE_URL must be told its "
            f"base URL: {escape(recording.address.base_url)}"
        )
    return "\n".join(lines)
