"""Options that say where the processes of a Dynamo deployment find and reach each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from lockstep.flags import Flag

_network_flag = partial(Flag, panel="Dynamo on several hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoNetwork:
    """The network of a Dynamo deployment.

    An option that is not set is left to Dynamo's own environment variables, which also hold the
    credentials.
    """

    discovery: Annotated[
        str | None,
        _network_flag(
            "etcd://HOST:2379 (etcds:// for TLS) where the processes of the deployment find "
            "each other. User and password: ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD."
        ),
    ] = None
    request_plane: Annotated[
        str | None,
        _network_flag(
            "Transport of requests to workers: tcp, or nats://HOST:4222; by default tcp. User and "
            "password: NATS_AUTH_USERNAME, NATS_AUTH_PASSWORD."
        ),
    ] = None
    event_plane: Annotated[
        Literal["zmq", "nats"] | None, _network_flag("Transport of events; by default zmq.")
    ] = None
    advertise: Annotated[
        str | None,
        _network_flag(
            "Address of this host for frontends and gateways. Workers listen on it, also for "
            "their admin routes, which have no password. By default loopback."
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether any option is set: the deployment is not one of this machine alone."""
        return self != DynamoNetwork()

    def environ(self) -> dict[str, str]:
        """Return the environment variables for Dynamo. Raises BadRequest for an invalid option."""
        from lockstep.protocol.dynamo.environment import network_environ

        return network_environ(
            self.discovery, self.request_plane, self.event_plane, self.advertise, os.environ
        )
