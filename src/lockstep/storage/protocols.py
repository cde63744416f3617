"""The protocols that every store implements: sessions, fleet state, leadership and API keys.

A gateway uses a store only through these four. `open_store` returns an object that holds one of
each; a backend is one folder beside this module. Every coroutine method raises Unavailable when the
store cannot be reached or does not respond in time; other errors are listed with the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from lockstep.storage.api_keys import OWN_PREFIX, KeyPrefix, StoredKey
from lockstep.storage.desired_state import Desired, FleetSnapshot, WorkerRecord
from lockstep.storage.session_entry import SessionEntry, SessionTerms
from lockstep.tokens.operation import Operation

Role = Literal["alone", "leader", "follower"]


class Totals(NamedTuple):
    """Number of stored sessions, and the bytes they hold together."""

    sessions: int
    bytes: int


class StoredSession(NamedTuple):
    """Encoded turns of a session in order, and its prefix breaks as (key, cause)."""

    turns: Sequence[bytes]
    breaks: Sequence[tuple[bytes, str]]


class LoadedSession(NamedTuple):
    """A session as it is stored now, with its turns from number `start` on.

    `stored.breaks` may repeat breaks that the caller has already.
    """

    entry: SessionEntry
    start: int
    stored: StoredSession


@dataclass(frozen=True, slots=True)
class NewTurns:
    """Turns to append to a session that has `head` turns.

    `encode` returns the bytes of each of the `count` turns; it may run in another thread, and
    raises Conflict when the session was deleted in the meantime. `nbytes` is the size of the whole
    session with these turns, `tokens` the number of tokens sampled in them.
    """

    head: int
    count: int
    encode: Callable[[], list[bytes]]
    nbytes: int
    tokens: int
    breaks: Sequence[tuple[bytes, str]]


class SessionStore(Protocol):
    """Sessions by name, each an append-only list of encoded turns.

    Writes are durable when they return. Writes of one session are applied in the order in which
    they were called; `append` is the only one that several gateways may race for, and at most one
    of them wins each position.
    """

    shared: bool
    """Whether other gateways may change the same sessions at any time."""
    secret: bytes
    """32 random bytes, the same for every gateway on this store; empty before `start`."""

    async def start(self) -> float:
        """Open the sessions and return the service clock. Raises BadRequest for unusable storage,
        such as a file of another format or one that another process holds."""
        ...

    async def stop(self) -> None:
        """Close the sessions after the writes that are under way."""
        ...

    def totals(self) -> Totals:
        """Return the totals over all sessions; in a shared store they may be seconds old."""
        ...

    async def find(self, name: str) -> SessionEntry | None:
        """Return the row of a session, or None."""
        ...

    async def find_key(self, digest: bytes) -> SessionEntry | None:
        """Return the session that the key with this digest was minted for, or None.

        A shared store may return a session for a few seconds after another gateway deleted it.
        """
        ...

    async def load(
        self, name: str, base: SessionEntry | None = None, turns: int = 0
    ) -> LoadedSession | None:
        """Return a session with its turns, or None when there is none of that name.

        While the stored session is still `base`, a shared store leaves out its first `turns`
        turns. Raises Conflict while the session is being deleted, and Unavailable when its turns
        are damaged.
        """
        ...

    async def append(self, entry: SessionEntry, new: NewTurns) -> bool:
        """Store turns and breaks, all or none, and update the entry. Creates the session if needed.

        A shared store returns False, and stores nothing, when the session no longer has exactly
        `new.head` turns, was finished, or has turns of another tokenizer; `load` then tells which.
        Raises what `new.encode` raises.
        """
        ...

    async def add_breaks(self, entry: SessionEntry, breaks: Sequence[tuple[bytes, str]]) -> None:
        """Store prefix breaks of a session that has turns; a break it has already is ignored."""
        ...

    async def create(self, entry: SessionEntry) -> bool:
        """Store a session without turns. Returns False if the name is taken."""
        ...

    async def count_call(self, entry: SessionEntry, calls: int = 1) -> None:
        """Count calls against the session's budget, atomically over all gateways.

        Raises Forbidden, and counts none, when the budget has fewer left.
        """
        ...

    async def change_terms(
        self, entry: SessionEntry, change: Callable[[SessionTerms], SessionTerms]
    ) -> None:
        """Replace the terms by `change(terms)`, as one atomic step, in the store and the entry.

        Raises NotFound for a deleted session, and what `change` raises; nothing changes then.
        """
        ...

    async def mark_read(self, entry: SessionEntry, turns: int) -> None:
        """Store that the samples of the first `turns` turns were read; the number never falls."""
        ...

    async def page(self, after: str, limit: int) -> list[SessionEntry]:
        """Return the first `limit` sessions with names greater than `after`, ordered by name."""
        ...

    async def latest(
        self, wanted: Callable[[str], bool], limit: int, offset: int
    ) -> tuple[list[str], int]:
        """Return a page of the names that `wanted` accepts, last used first, and their number."""
        ...

    async def remove(self, entries: Iterable[SessionEntry]) -> None:
        """Delete sessions with their turns, all or none. Missing sessions are ignored."""
        ...

    async def expire(
        self, since: float, unread: bool, idle: Callable[[str], bool], limit: int
    ) -> list[str]:
        """Delete up to `limit` sessions that were last active before `since`; return their names.

        Sessions with unread turns stay unless `unread` is set. `idle` is called with a name before
        its session is deleted, and returns False while a request of this gateway uses it.
        """
        ...

    async def save_clock(self, seconds: float) -> float:
        """Advance the stored service clock to `seconds`; return it, which may be later."""
        ...

    async def refresh_totals(self) -> None:
        """Bring `totals` up to date with the changes of other gateways."""
        ...


class ControlStore(Protocol):
    """Desired state, operations and workers of a fleet.

    Writes are durable and applied in order when they return. In a shared store only the leader
    writes: every writing method raises Superseded, and writes nothing, once another gateway leads.
    """

    async def desired(self) -> Desired:
        """Return the desired state; an empty one before the first `save`."""
        ...

    async def save(self, desired: Desired, workers: Sequence[WorkerRecord] | None = None) -> None:
        """Replace the desired state, and the workers if given, in one transaction."""
        ...

    async def record(self, operation: Operation) -> None:
        """Insert or update an operation by its id; operations beyond the last 1,000 are dropped."""
        ...

    async def cut_off(self) -> None:
        """Mark operations that are still running as lost; a new leader calls this first."""
        ...

    async def operation(self, operation_id: str) -> Operation | None:
        """Return an operation by its id, or None."""
        ...

    async def by_key(self, key: str) -> Operation | None:
        """Return the last operation with this idempotency key, or None."""
        ...

    async def latest(self, count: int) -> list[Operation]:
        """Return the last `count` operations, newest first."""
        ...

    async def publish(self, workers: Sequence[WorkerRecord]) -> None:
        """Replace the workers that followers serve from."""
        ...

    async def snapshot(self) -> FleetSnapshot:
        """Return desired state and workers of one moment."""
        ...

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever `snapshot` may return something new, until the store closes."""
        ...

    async def close(self) -> None:
        """Release what this object alone holds."""
        ...


class GatewayView(msgspec.Struct, frozen=True):
    """A gateway of the fleet: its admin URL, and the seconds since it last wrote to the store."""

    address: str
    leads: bool
    seen_seconds: float


class LeadershipView(msgspec.Struct, frozen=True):
    """The leader as this gateway sees it. `leader` is an admin URL, None while it is unknown."""

    role: Role
    generation: int
    leader: str | None = None
    gateways: tuple[GatewayView, ...] = ()


class Leadership(Protocol):
    """Election of the one gateway that may change the fleet.

    Every election has a higher generation than all before it. Workers and stores reject commands
    of a lower generation, so that a deposed leader cannot change anything.
    """

    @property
    def shared(self) -> bool:
        """Whether other gateways may lead."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this gateway may change the fleet now."""
        ...

    @property
    def generation(self) -> int:
        """Generation of the current leader, as far as this gateway knows."""
        ...

    @property
    def holder(self) -> str:
        """Identity of this gateway process, new at every start. A generation that this gateway
        leads under belongs to it alone: workers reject the same number from another holder."""
        ...

    async def start(self, stored: int, changed: Callable[[], None]) -> None:
        """Take part in elections, with generations above `stored`.

        `changed` is called after this gateway or another one became leader, or stopped to be it.
        """
        ...

    def announce(self, address: str) -> None:
        """Publish the URL of this gateway's admin port, to which followers forward calls."""
        ...

    async def rise_above(self, number: int) -> int:
        """Raise this leader's generation above `number` and return it. Raises Superseded when
        another gateway leads."""
        ...

    def view(self) -> LeadershipView:
        """Return the current leader and the gateways that are alive."""
        ...

    async def stop(self) -> None:
        """Leave the election; another gateway may lead at once."""
        ...


class KeyStore(Protocol):
    """API keys by digest, shared by all gateways of a store."""

    keys: tuple[StoredKey, ...]
    """The keys as of the last read; a new tuple whenever they changed."""
    required: bool
    """Whether a key was ever added. Stays True after the last key is revoked, so that a store
    never opens to requests without a key."""

    async def follow(self) -> None:
        """Keep `keys` and `required` up to date until the store closes; the first read is done
        when it returns."""
        ...

    async def read(self) -> tuple[StoredKey, ...]:
        """Read the keys that are not revoked, oldest first."""
        ...

    async def add(self, tenant: str, prefix: KeyPrefix = OWN_PREFIX) -> tuple[StoredKey, str]:
        """Mint a key for a tenant; return its stored form and the key, which is stored nowhere.

        Raises BadRequest for an invalid tenant name.
        """
        ...

    async def revoke(self, key_id: str) -> StoredKey:
        """Revoke a key for every gateway, for good. Raises NotFound."""
        ...
