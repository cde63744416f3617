"""Bodies of the control plane's session routes."""

from __future__ import annotations

import msgspec


class MintSession(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A session with a key of its own. `id` is made up where it is left out.

    `seconds`, `max_calls` and `max_tokens` (sampled ones) are its budget. Sessions with the same
    `cache_salt` share cached prompts; by default each has its own.
    """

    id: str | None = None
    tenant: str = "default"
    seconds: float | None = None
    max_calls: int | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None


class MintedSession(msgspec.Struct, kw_only=True):
    """`id` is the session's name on the control plane, `session` the one that its tenant uses. The
    key is shown once. `base_path` ends the base URL of a client that names the session by path."""

    id: str
    session: str
    tenant: str
    key: str
    key_id: str
    base_path: str


class FinishSession(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    reward: float | None = None
