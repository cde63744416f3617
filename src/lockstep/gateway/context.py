"""The objects that the routes of a gateway share."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.protocol.json.strict import LIMITS, RequestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """The fleet's workers, the models they serve, and the sessions that requests may join."""

    pool: Pool
    models: ModelRegistry
    sessions: Sessions
    limits: RequestLimits = LIMITS
