"""Gateway sessions for agents: minted for one rollout, with a key and a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.client.policy import Policy
from lockstep.protocol.control.sessions import MintedSession
from lockstep.tokens import Sample

WAIT_SECONDS = 30.0


@runtime_checkable
class SessionFleet(Protocol):
    """The session calls of a control plane. `lockstep.fleet.remote.RemoteFleet` implements them."""

    async def mint_session(self, **options: Any) -> MintedSession: ...

    async def wait_session(self, session: str, *, seconds: float = 30.0) -> dict[str, Any]: ...

    async def finish_session(self, session: str, reward: float | None = None) -> dict[str, Any]: ...

    async def samples(
        self,
        session: str,
        *,
        train_aborted: bool = False,
        dedupe: bool = True,
        kinds: Sequence[str] | None = None,
        weights: str | None = None,
    ) -> list[Sample]: ...

    async def end_session(self, session: str) -> None: ...


@dataclass(frozen=True, slots=True)
class AgentSession:
    """The session of one agent. `base_url` ends in /v1, `url` is the same without it."""

    id: str
    url: str
    key: str
    model: str
    fleet: SessionFleet

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    async def wait_end(self) -> None:
        """Wait until the session has ended for any reason."""
        while (await self.fleet.wait_session(self.id, seconds=WAIT_SECONDS))["ended"] is None:
            pass

    async def budget_used(self) -> str | None:
        """Return the budget that ended the session (calls, tokens or seconds), or None."""
        ended = (await self.fleet.wait_session(self.id, seconds=0))["ended"]
        return None if ended is None or ended["by"] in ("finish", "harness") else ended["by"]


@dataclass(frozen=True, slots=True)
class AgentSessions:
    """Opens sessions for `model` at the gateway `url`, through its control plane."""

    url: str
    model: str
    fleet: SessionFleet

    async def open(self, **budget: Any) -> AgentSession:
        """Open a session; `budget` may have seconds, max_calls and max_tokens.

        Raises what minting a session raises, such as Busy when there are too many.
        """
        minted = await self.fleet.mint_session(**budget)
        url = self.url.rstrip("/") + minted.base_path.removesuffix("/v1")
        return AgentSession(minted.id, url, minted.key, self.model, self.fleet)


def agent_sessions(url: str, policy: Policy, fleet: object) -> AgentSessions | None:
    """Return the opener of sessions for a run; None when its fleet has no sessions."""
    if policy.model is None or not isinstance(fleet, SessionFleet):
        return None
    return AgentSessions(url, policy.model, fleet)
