"""`lockstep keys`: the API keys of gateways and their tenants, as digests in a file or a store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from lockstep.cli.output import print_json
from lockstep.settings import Settings
from lockstep.storage import open_store
from lockstep.storage.api_keys import OWN_PREFIX, KeyPrefix
from lockstep.storage.key_file import KeyFile
from lockstep.tokens.errors import BadRequest

app = typer.Typer(
    no_args_is_help=True,
    help="API keys of a gateway. A key belongs to a tenant, and no other tenant can use its "
    "sessions.",
)
PathOption = Annotated[
    Path | None,
    typer.Option("--key-file", help="The key file; by default LOCKSTEP_KEY_FILE."),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="The PostgreSQL store of several gateways, instead of a file; by default "
        "LOCKSTEP_STORE.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant that the key is for.")],
    prefix: Annotated[
        KeyPrefix,
        typer.Option(
            help="Prefix of the key: tml- for Tinker clients, which send no others. The gateway "
            "treats both alike."
        ),
    ] = OWN_PREFIX,
    key_file: PathOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a new key and print it. The key itself is not stored: keep it.

    A tenant may have several keys: to rotate a key, add another and revoke the first.
    """
    stored, key = asyncio.run(_on_keys(key_file, store, lambda keys: keys.add(tenant, prefix)))
    if as_json:
        print_json({"id": stored.id, "tenant": stored.tenant, "key": key})
        return
    sys.stdout.write(f"{key}\n")
    Console(stderr=True).print(f"Added {stored.id} of tenant {tenant}.", markup=False)


@app.command("list")
def list_keys(
    key_file: PathOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """List the keys by their ids, as logs name them."""
    keys = asyncio.run(_on_keys(key_file, store, lambda keys: keys.read()))
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
    store: StoreOption = None,
) -> None:
    """Revoke a key: gateways refuse it within a second."""
    stored = asyncio.run(_on_keys(key_file, store, lambda keys: keys.revoke(key)))
    Console(stderr=True).print(f"Revoked {stored.id} of tenant {stored.tenant}.", markup=False)


async def _on_keys(key_file: Path | None, store: str | None, work: Callable[[Any], Any]) -> Any:
    """Return the result of `work` on the keys of the key file or the store.

    Raises BadRequest when neither or both are given.
    """
    settings = Settings.read()
    if key_file is None and store is None:
        key_file, store = settings.key_file, settings.store
    if (key_file is None) == (store is None):
        raise BadRequest(
            "no key file and no store: give --key-file or --store, or set one of "
            "LOCKSTEP_KEY_FILE and LOCKSTEP_STORE",
            param="key_file",
        )
    if key_file is not None:
        return work(KeyFile(key_file))
    async with open_store(store or "") as opened:
        if opened.keys is None:
            raise BadRequest(
                "a store of one gateway has no API keys: give --key-file", param="store"
            )
        return await work(opened.keys)
