"""The runs, checkpoints and samplers of each tenant of a gateway, out of reach for the others."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from starlette.requests import Request

from lockstep.gateway.tenants import Caller, caller_of
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.sampling import BaseModel
from lockstep.integrations.tinker.service import LoraTrainer, TinkerService
from lockstep.integrations.tinker.store import SCHEME, Store, file_name, parse
from lockstep.storage.api_keys import DEFAULT_TENANT
from lockstep.tokens.errors import NotFound

TENANTS = "tenants"


class TinkerTenants:
    """One service for each tenant, over one trainer and one fleet. Used from one event loop."""

    def __init__(
        self, base: BaseModel, trainer: LoraTrainer, samplers: Samplers, root: Path
    ) -> None:
        """`root` holds the files of the default tenant, and below them those of the others."""
        self.base = base
        self._trainer = trainer
        self._samplers = samplers
        self._root = root
        self._services: dict[str, TinkerService] = {}
        # Ids of runs and samplers begin with that of the session that made them, and a session
        # stays with its tenant for good: nothing has to be taken out when a run is deleted.
        self._by_session: dict[str, TinkerService] = {}
        self._open(Caller())
        for directory in sorted((root / TENANTS).glob("*")):
            self._open(Caller(unquote(directory.name)))  # what has expired is deleted now

    def of(self, request: Request) -> TinkerService:
        """The service of whoever sent this request."""
        caller = caller_of(request)
        service = self._services.get(caller.tenant) or self._open(caller)
        # A tenant's salt is not known before its first request.
        service.sampling.cache_salt = caller.cache_salt(None)
        return service

    def _open(self, caller: Caller) -> TinkerService:
        root = self._root
        if caller.tenant != DEFAULT_TENANT:
            root = root / TENANTS / file_name(caller.tenant)
        store = Store(root)

        def own(session_id: str) -> None:
            self._by_session[session_id] = service

        service = TinkerService(self.base, self._trainer, store, self._samplers, own)
        for session_id in store.session_ids():
            own(session_id)
        self._services[caller.tenant] = service
        return service

    async def served_as(self, name: str) -> str | None:
        """The adapter that the fleet serves a sampler as, which is loaded if need be; None for a
        name that is none of a sampler.

        Samplers are named by the paths of their checkpoints (tinker://...), or by their ids. Both
        hold an id that nobody can guess. Raises NotFound for one that is gone, and BadRequest for a
        path that is none.
        """
        if name.startswith(SCHEME):
            owner_id = parse(name)[0]
        elif ":sample:" in name:
            owner_id = name
        else:
            return None
        service = self._by_session.get(owner_id.partition(":")[0])
        if service is None:
            raise NotFound(f"sampler {name!r:.200} does not exist here", param="model")
        directory = service.sampling.directory(name)
        self._samplers.check_base()
        return await self._samplers.serve(directory)

    def end_polls(self) -> None:
        """Has everybody who waits come back later: the server ends."""
        for service in self._services.values():
            service.futures.end_polls()

    async def close(self) -> None:
        """Stops all work; what was not saved is lost."""
        for service in self._services.values():
            await service.close()
