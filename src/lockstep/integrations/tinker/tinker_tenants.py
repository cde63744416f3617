"""Separate runs, checkpoints and samplers for each tenant of a gateway."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from starlette.requests import Request

from lockstep.gateway.callers import Caller, caller_of
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.sampling_service import BaseModel
from lockstep.integrations.tinker.tinker_service import LoraTrainer, TinkerService
from lockstep.integrations.tinker.tinker_store import SCHEME, TinkerStore, file_name, parse
from lockstep.storage.api_keys import DEFAULT_TENANT
from lockstep.tokens.errors import NotFound

TENANTS = "tenants"


class TinkerTenants:
    """One service for each tenant, over one trainer and one fleet. Used from one event loop."""

    def __init__(
        self, base: BaseModel, trainer: LoraTrainer, samplers: Samplers, root: Path
    ) -> None:
        """`root` holds the files of the default tenant, and `root`/tenants those of the others."""
        self.base = base
        self._trainer = trainer
        self._samplers = samplers
        self._root = root
        self._services: dict[str, TinkerService] = {}
        # Ids of runs and samplers start with the id of their session, and a session never changes
        # its tenant: nothing has to be removed when a run is deleted.
        self._by_session: dict[str, TinkerService] = {}
        self._open(Caller())
        for directory in sorted((root / TENANTS).glob("*")):
            self._open(Caller(unquote(directory.name)))  # also deletes expired checkpoints

    def of(self, request: Request) -> TinkerService:
        """Return the service of the tenant that sent this request."""
        caller = caller_of(request)
        service = self._services.get(caller.tenant) or self._open(caller)
        # A tenant's salt is not known before its first request.
        service.sampling.cache_salt = caller.cache_salt(None)
        return service

    def _open(self, caller: Caller) -> TinkerService:
        root = self._root
        if caller.tenant != DEFAULT_TENANT:
            root = root / TENANTS / file_name(caller.tenant)
        store = TinkerStore(root)

        def register(session_id: str) -> None:
            self._by_session[session_id] = service

        service = TinkerService(self.base, self._trainer, store, self._samplers, register)
        for session_id in store.session_ids():
            register(session_id)
        self._services[caller.tenant] = service
        return service

    async def served_as(self, name: str, tenant: str) -> str | None:
        """Load the tenant's sampler of that name if needed, and return its adapter; None for other
        names.

        Samplers are named by the path of their checkpoint (tinker://...) or by their id. Raises
        NotFound for a sampler of another tenant or one that was deleted, and BadRequest for a
        malformed path.
        """
        if name.startswith(SCHEME):
            owner_id = parse(name)[0]
        elif ":sample:" in name:
            owner_id = name
        else:
            return None
        service = self._by_session.get(owner_id.partition(":")[0])
        if service is None or service is not self._services.get(tenant):
            raise NotFound(f"sampler {name!r:.200} does not exist on this server", param="model")
        directory = service.sampling.directory(name)
        self._samplers.check_base()
        return await self._samplers.serve(directory)

    def end_polls(self) -> None:
        """End all polls, so that clients poll again later: the server is shutting down."""
        for service in self._services.values():
            service.futures.end_polls()

    async def close(self) -> None:
        """Stop all work. Unsaved weights are lost."""
        for service in self._services.values():
            await service.close()
