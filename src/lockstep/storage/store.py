"""Opens a store by its URL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from lockstep.storage.protocols import ControlStore, KeyStore, Leadership, SessionStore
from lockstep.tokens.errors import BadRequest


class Backend(NamedTuple):
    """A folder of this package, and whether several gateways may share its stores.

    Its module `backend` has `open_backend(url, model)`, an async context manager that returns a
    Store. It is imported when a store is opened, since its driver may not be installed.
    """

    folder: str
    shared: bool


BACKENDS = {
    "memory": Backend("sqlite", shared=False),
    "sqlite": Backend("sqlite", shared=False),
    "postgresql": Backend("postgres", shared=True),
    "postgres": Backend("postgres", shared=True),
}
"""The backend of every URL scheme."""


@dataclass(frozen=True, slots=True)
class Store:
    """An open store. `keys` is None where the backend stores no API keys."""

    sessions: SessionStore
    control: ControlStore
    leadership: Leadership
    keys: KeyStore | None

    @property
    def shared(self) -> bool:
        """Whether other gateways may use the same store."""
        return self.leadership.shared


@asynccontextmanager
async def open_store(url: str, *, model: str | None = None) -> AsyncIterator[Store]:
    """Open a store while the block runs.

        async with open_store("postgresql://lockstep@db/lockstep") as store:
            fleet = Fleet(pool, store.control, leadership=store.leadership)
            async with Sessions(store.sessions) as sessions: ...

    `model` is the label of the model that a store of one gateway is for. Raises BadRequest for a
    URL that does not work, for a store that another process holds, and for one of another model;
    Unavailable when its server cannot be reached.
    """
    module = import_module(f"{__package__}.{find_backend(url).folder}.backend")
    opened: AbstractAsyncContextManager[Store] = module.open_backend(url, model)
    async with opened as store:
        yield store


def find_backend(url: str) -> Backend:
    """Return the backend of a URL. Raises BadRequest for an unknown scheme."""
    backend = BACKENDS.get(url.partition(":")[0])
    if backend is None:
        # Without the URL, which may hold a password.
        raise BadRequest(
            f"the store is no URL of {', '.join(BACKENDS)}: expected one like "
            "postgresql://user@host:5432/database?schema=lockstep",
            param="store",
        )
    return backend
