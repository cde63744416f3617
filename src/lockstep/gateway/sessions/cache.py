"""The most recently used sessions, in memory; and a session as one request uses it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from lockstep import tracing
from lockstep.ledger import Breaks, Ledger, Node, PromptPlan
from lockstep.render import Renderer
from lockstep.render.messages import Plain, plain_messages
from lockstep.storage.session_entry import SessionEntry
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.gateway.sessions.sessions import Sessions

SESSION_BYTES = 2000
"""Memory of a session beside its turns, as measured; for accounting only."""
BREAK_BYTES = 100


class WaitingTurn(NamedTuple):
    """Choices of a reply that wait to be stored; `stored` gets their number when they are."""

    plan: PromptPlan
    choices: Sequence[tuple[Completion, Any]]
    stored: asyncio.Future[int]


class CachedSession:
    """A session in memory. Requests that use it hold a reference, which keeps it the only object
    of its name.

    `ended` is the error for requests that still use it after it was deleted. `waiting` are turns to
    be written after those that the task `writing` is writing.
    """

    __slots__ = (
        "__weakref__",
        "counted_bytes",
        "cut",
        "ended",
        "entry",
        "ledger",
        "reserved",
        "unsaved_breaks",
        "waiting",
        "writing",
    )  # fmt: skip

    def __init__(self, entry: SessionEntry, ledger: Ledger) -> None:
        self.entry, self.ledger = entry, ledger
        self.counted_bytes = 0
        self.reserved = 0
        """Tokens of the session's budget that running calls may still use."""
        self.ended: LockstepError | None = None
        self.unsaved_breaks: list[tuple[bytes, str]] = []
        self.waiting: list[WaitingTurn] = []
        self.writing: asyncio.Task[None] | None = None
        self.cut: set[asyncio.Future[int]] = set()
        """Turns that were cut and are being stored: the next plan waits for them."""
        # Not a bound method of this object, through which the ledger would keep it alive.
        ledger.on_break = self.unsaved_breaks.append

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def nbytes(self) -> int:
        """Size of the session, as its limits count it."""
        ledger = self.ledger
        return ledger.nbytes + SESSION_BYTES + BREAK_BYTES * ledger.break_counts.total()

    def check_alive(self) -> None:
        """Raise the error of a session that has ended."""
        if (error := self.ended) is not None:
            raise type(error)(error.message, param=error.param)

    def __del__(self) -> None:
        # Turns and their children refer to each other. Breaking the cycles frees an evicted session
        # at once, instead of at the next run of the garbage collector.
        for node in self.ledger.nodes:
            node.children.clear()


class SessionCache:
    """The most recently used sessions, up to `limit` bytes, and all sessions that requests hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0
        self._recent: OrderedDict[str, CachedSession] = OrderedDict()
        self._held: WeakValueDictionary[str, CachedSession] = WeakValueDictionary()
        self._without_turns: WeakSet[CachedSession] = WeakSet()

    @property
    def without_turns(self) -> int:
        """Number of sessions with requests but no turn yet; they vanish with their requests."""
        return len(self._without_turns)

    def __len__(self) -> int:
        return len(self._recent)

    def find(self, name: str) -> CachedSession | None:
        """Return a session in memory, or None."""
        session = self._held.get(name)
        if session is not None:
            self.touch(session)
        return session

    def add(self, session: CachedSession) -> None:
        """Add a session that was loaded or begun."""
        self._held[session.name] = session
        if not session.entry.turns:
            self._without_turns.add(session)
        self.touch(session)

    def touch(self, session: CachedSession) -> None:
        """Make a session the most recent, count its growth, and evict others past the limit."""
        if self._held.get(session.name) is not session or not session.entry.turns:
            return
        self._without_turns.discard(session)
        if session.name in self._recent:
            self.nbytes -= session.counted_bytes
        ledger = session.ledger
        caches = ledger.id_json.nbytes + ledger.read_history.nbytes
        session.counted_bytes = session.nbytes + caches
        self.nbytes += session.counted_bytes
        self._recent[session.name] = session
        self._recent.move_to_end(session.name)
        while self.nbytes > self.limit and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self.nbytes -= oldest.counted_bytes
            self.evicted += 1

    def drop(self, session: CachedSession, error: LockstepError) -> None:
        """End a session with an error for the requests that hold it, and free its name."""
        session.ended = error
        self._without_turns.discard(session)
        if self._held.get(session.name) is session:
            del self._held[session.name]
        if self._recent.get(session.name) is session:
            del self._recent[session.name]
            self.nbytes -= session.counted_bytes

    def release(self, name: str) -> bool:
        """Remove an idle session from memory; return False while a request holds it."""
        session = self._recent.pop(name, None)
        if session is not None:
            self.nbytes -= session.counted_bytes
            del session
        if (held := self._held.get(name)) is None:
            return True
        self.touch(held)
        return False


class Reservation:
    """Tokens of a session's budget that a running request may still use."""

    def __init__(self, cached: CachedSession, tokens: int) -> None:
        """Reserve them until `release`, or until the task of the running request ends."""
        self._cached, self._tokens = cached, tokens
        cached.reserved += tokens
        # A request may end in many ways (an error, a client that left, a cancelled stream): the
        # end of its task is the one that all of them share.
        if (task := asyncio.current_task()) is not None:
            task.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        """Return the tokens to the budget; once, however often it is called."""
        self._cached.reserved -= self._tokens
        self._tokens = 0


class Session:
    """A session as one request uses it. Plan and commit with the same object."""

    def __init__(
        self, owner: Sessions, cached: CachedSession, renderer: Renderer, breaks: Breaks
    ) -> None:
        self._owner, self._cached, self._renderer, self._breaks = owner, cached, renderer, breaks
        self._reservations: list[Reservation] = []

    @property
    def id(self) -> str:
        return self._cached.name

    @property
    def strict(self) -> bool:
        """Whether a turn that cannot be in one sample with the turns before is rejected."""
        return self._breaks == "strict"

    async def plan(self, messages: Iterable[Any], tools: Iterable[Any] | None = None) -> PromptPlan:
        """Return the prompt for these messages, whose ids may be undecoded; see Ledger.plan.

        Raises what that raises, and TooLarge when the session is at its limit of turns or bytes.
        Limits are checked here and not in `commit`, which stores every turn that was sampled.
        """
        await self._owner.begin_call(self._cached)
        try:
            return await self._cached.ledger.plan_async(
                messages, tools, renderer=self._renderer, breaks=self._breaks, lazy=True
            )
        finally:
            self._owner.count_breaks(self._cached)

    async def reserve(self, sampling: Sampling, room: int | None = None) -> Sampling:
        """Reserve the session's budget until the next `commit`, and return `sampling` with a token
        limit that the budget covers; see Sessions.reserve."""
        sampling, reservation = await self._owner.reserve(self._cached, sampling, room)
        if reservation is not None:
            self._reservations.append(reservation)
        return sampling

    async def plan_ids(self, prompt_ids: Sequence[int]) -> PromptPlan:
        """Return the plan for a prompt of ids; see Ledger.plan_ids. Raises what `plan` raises."""
        await self._owner.begin_call(self._cached)
        try:
            return self._cached.ledger.plan_ids(prompt_ids, breaks=self._breaks)
        finally:
            self._owner.count_breaks(self._cached)

    def history(self, request_id: str) -> list[Plain] | None:
        """Return the messages up to and with the turn of a request; None if it is not here."""
        for node in reversed(self._cached.ledger.nodes):
            if node.request_id == request_id:
                return plain_messages(node.messages())
        return None

    def replies(self) -> Iterator[tuple[str, Plain]]:
        """Yield the id of each request with its reply, newest first."""
        for node in reversed(self._cached.ledger.nodes):
            yield node.request_id, plain_messages([node.reply])[0]

    async def continue_(self, node: Node) -> PromptPlan:
        """Return the prompt that continues an aborted turn; see Ledger.continue_."""
        await self._owner.begin_call(self._cached)
        return self._cached.ledger.continue_(node)

    async def commit(self, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]) -> None:
        """Store every choice of a reply as a branch: all of them, or none.

        They are durable when this returns. Raises what Ledger.commit raises; Conflict when the
        session was deleted or finished in the meantime; Unavailable when they could not be stored,
        and then the session is unchanged. (If a shared store fails during the commit itself, it
        may turn out to have them.) Cancelling the caller does not undo the write.
        """
        if (tracer := tracing.active) is None:
            await self._owner.store(self._cached, plan, choices)
        else:
            with tracer.span("store", {"lockstep.session": self.id}):
                await self._owner.store(self._cached, plan, choices)
        if self._reservations:  # the store has counted the tokens
            self._reservations.pop().release()

    def commit_cut(self, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]) -> None:
        """Start to store what arrived of a turn whose client left or whose worker failed.

        The next plan of this session waits for it. A failure to store it is logged. Raises Conflict
        when the session was deleted.
        """
        self._owner.store_cut(self._cached, plan, choices)


class ServiceClock:
    """Seconds for which gateways have served a store, over all their restarts.

    It advances only while a gateway runs, so that neither a changed time of day nor a night
    switched off makes sessions look unused.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = 0.0

    def restore(self, seconds: float) -> None:
        """Continue from a stored time."""
        self._offset = seconds - self._monotonic()

    def now(self) -> float:
        """Return the time in seconds."""
        return self._monotonic() + self._offset
