"""`lockstep keys`: the API keys of a gateway and their tenants, in a file of digests."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from lockstep.cli.output import print_json
from lockstep.gateway.key_file import KeyFile
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest

app = typer.Typer(
    no_args_is_help=True,
    help="API keys of a gateway: each is of a tenant, whose sessions nobody else can use.",
)
PathOption = Annotated[
    Path | None,
    typer.Option("--key-file", help="The key file; by default LOCKSTEP_KEY_FILE."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant that the key is for.")],
    key_file: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a new key and print it. It is stored nowhere: keep it.

    A tenant may have several: to rotate one, add another, and revoke the first.
    """
    stored, key = _file(key_file).add(tenant)
    if as_json:
        print_json({"id": stored.id, "tenant": stored.tenant, "key": key})
        return
    sys.stdout.write(f"{key}\n")
    Console(stderr=True).print(f"Added {stored.id} of tenant {tenant}.", markup=False)


@app.command("list")
def list_keys(key_file: PathOption = None, as_json: JsonOption = False) -> None:
    """List the keys by their ids, as logs name them."""
    keys = _file(key_file).read()
    if as_json:
        print_json([msgspec.to_builtins(key) for key in keys])
        return
    for key in keys:
        created = datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d %H:%M")
        sys.stdout.write(f"{key.id}\t{key.tenant}\t{created}\n")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Id of the key, as `lockstep keys list` shows it.")],
    key_file: PathOption = None,
) -> None:
    """Revoke a key: gateways refuse it within a second."""
    stored = _file(key_file).revoke(key)
    Console(stderr=True).print(f"Revoked {stored.id} of tenant {stored.tenant}.", markup=False)


def _file(given: Path | None) -> KeyFile:
    path = given or Settings.read().key_file
    if path is None:
        raise BadRequest(
            "which key file? Give --key-file, or set LOCKSTEP_KEY_FILE", param="key_file"
        )
    return KeyFile(path)
