"""URLs by which the files of a checkpoint are downloaded without a key, for an hour."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from lockstep.integrations.tinker.tinker_store import TinkerStore, now
from lockstep.tokens.errors import BadRequest, NotFound

SECRET_PATHS = "/api/v1/download/"
"""Path of the downloads. The SDK fetches them without the key, so their URLs are secret."""
VALID = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Download:
    """A file, and when its URL ends."""

    file: Path
    expires: datetime


class Downloads:
    """The valid URLs. They end with the process: the SDK asks for new ones."""

    def __init__(self) -> None:
        self._by_token: dict[str, Download] = {}
        self.routes = [Route(SECRET_PATHS + "{token}/{name}", self._read, methods=["GET"])]

    def sign(
        self, request: Request, store: TinkerStore, path: str
    ) -> tuple[dict[str, str], datetime]:
        """Return a URL for each file of a checkpoint by its name, and when they end.

        Raises NotFound for an unknown checkpoint, BadRequest for one of another kind.
        """
        record, _ = store.checkpoint(path)
        if record.kind != "external_weights":
            raise BadRequest(
                f"path is {path!r:.200}: only external_weights can be downloaded; "
                "`tinker checkpoint download` exports others first",
                param="path",
            )
        moment = now()
        for token, download in list(self._by_token.items()):
            if download.expires < moment:
                del self._by_token[token]
        base = str(request.base_url).rstrip("/") + SECRET_PATHS
        urls = {}
        for file in store.files(path):
            token = secrets.token_urlsafe(32)
            self._by_token[token] = Download(file, moment + VALID)
            urls[file.name] = f"{base}{token}/{file.name}"
        return urls, moment + VALID

    async def _read(self, request: Request) -> Response:
        download = self._by_token.get(request.path_params["token"])
        name = request.path_params["name"]
        if download is None or download.expires < now() or download.file.name != name:
            raise NotFound("there is no such download, or its time is over: ask for a new URL")
        if not download.file.is_file():
            raise NotFound(f"{name} was deleted with its checkpoint")
        return FileResponse(download.file, media_type="application/octet-stream")
