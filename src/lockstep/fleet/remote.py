"""Client of the control plane of a gateway in another process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from lockstep.backends.admin import PauseMode
from lockstep.checkpoint.stores.url import is_url
from lockstep.http.client.client import HttpClient
from lockstep.protocol.control.sessions import MintedSession
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.operation import Operation

log = logging.getLogger(__name__)


class RemoteFleet:
    """The control plane at `url`. Changes return the operation that `Fleet` would have returned.

        async with RemoteFleet("http://127.0.0.1:8001", token_file="admin.token") as fleet:
            operation = await fleet.update_weights("/checkpoints/step_10")

    Failures raise the error that `Fleet` would have raised, with the record of its operation.
    `token` is the admin token; `token_file` holds it. An update may take `timeout` seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        timeout: float = 1800.0,
    ) -> None:
        if token is None and token_file is not None:
            try:
                token = Path(token_file).read_text().strip()
            except OSError as error:
                raise BadRequest(f"{token_file} cannot be read: {error}", param="token") from None
        if not token:
            raise BadRequest(
                "the control plane needs its admin token: give token or token_file (the gateway "
                "names the file when it is ready)",
                param="token",
            )
        self._client = HttpClient(url, api_key=token, timeout=timeout, retries=0)

    async def __aenter__(self) -> RemoteFleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def state(self) -> dict[str, Any]:
        """Return versions, workers and last operations, as `lockstep state` shows them."""
        return self._decode(await self._client.get("/v1/rl/state"))

    async def pause(
        self,
        mode: PauseMode = "keep",
        *,
        lease_seconds: float | None = None,
        key: str | None = None,
    ) -> Operation:
        """Pause all workers; return when none generates. The pause ends when its lease does."""
        return await self._change("pause", key, mode=mode, lease_seconds=lease_seconds)

    async def resume(self, *, key: str | None = None) -> Operation:
        """Let every worker generate again."""
        return await self._change("resume", key)

    async def flush(self, *, key: str | None = None) -> Operation:
        """Drop cached prefixes on every worker."""
        return await self._change("flush_cache", key)

    async def update_weights(
        self,
        weight_dir: str | Path,
        version: str | None = None,
        *,
        mode: PauseMode = "keep",
        key: str | None = None,
    ) -> Operation:
        """Update the weights of all workers, verified. Calls with the same `key` update once.

        `weight_dir` is a directory, or a URL in an object store.
        """
        text = str(weight_dir)
        where = text if is_url(text) else str(Path.cwd() / text)
        return await self._change(
            "update_weights", key, weight_dir=where, version=version, mode=mode
        )

    async def load_adapter(
        self, name: str, path: str | Path, version: str | None = None, *, key: str | None = None
    ) -> Operation:
        """Load an adapter on all workers. It replaces an adapter of that name."""
        where = str(Path.cwd() / path)
        return await self._change(
            "load_lora_adapter", key, lora_name=name, lora_path=where, version=version
        )

    async def unload_adapter(self, name: str, *, key: str | None = None) -> Operation:
        """Unload an adapter from all workers."""
        return await self._change("unload_lora_adapter", key, lora_name=name)

    async def operation(self, operation_id: str) -> Operation:
        """Return the record of an operation by its id. Raises NotFound."""
        body = await self._client.get(f"/v1/rl/operations/{quote(operation_id)}")
        return msgspec.json.decode(body, type=Operation)

    async def add_worker(self, url: str, **options: Any) -> dict[str, Any]:
        """Add a worker to the fleet. Options are the fields of AddWorker."""
        return await self._post("workers", url=url, **options)

    async def workers(self) -> list[dict[str, Any]]:
        """Return one row per worker: id, URLs, state and version."""
        rows: list[dict[str, Any]] = self._decode(await self._client.get("/v1/rl/workers"))[
            "workers"
        ]
        return rows

    async def drain(self, worker_id: str, *, drain_seconds: float = 30.0) -> dict[str, Any]:
        """Send a worker no new requests, wait up to `drain_seconds`, and drop it."""
        path = f"/v1/rl/workers/{quote(worker_id)}?drain_seconds={drain_seconds}"
        return self._decode(await self._client.delete(path, timeout=drain_seconds + 30))

    async def samples(
        self,
        session: str,
        *,
        train_aborted: bool = False,
        dedupe: bool = True,
        kinds: Iterable[str] | None = None,
        weights: str | None = None,
    ) -> list[Sample]:
        """Return the samples of every branch of a session; with `dedupe` each token is trained
        once.

        `kinds` selects kinds of branches, `weights` sets how much samples count; see
        Ledger.samples. A warning names the kinds with trainable tokens that are left out. Raises
        BadRequest for unknown kinds and weights.
        """
        query = f"train_aborted={train_aborted}&dedupe={dedupe}".lower()
        if kinds is not None:
            query += "&kinds=" + quote(",".join([kinds] if isinstance(kinds, str) else kinds))
        if weights is not None:
            query += f"&weights={quote(weights)}"
        path = f"/v1/rl/sessions/{quote(session)}?{query}"
        body = self._decode(await self._client.get(path, timeout=60.0))
        for kind, tokens in body.get("left_out", {}).items():
            log.warning(
                "session %s: kinds leaves out %d trainable tokens of kind %r", session, tokens, kind
            )
        return [Sample.from_json(msgspec.json.encode(sample)) for sample in body["samples"]]

    async def mint_session(self, **options: Any) -> MintedSession:
        """Create a session with its own API key. Options are the fields of MintSession."""
        request = {name: value for name, value in options.items() if value is not None}
        body = await self._client.post("/v1/rl/sessions", msgspec.json.encode(request))
        return msgspec.json.decode(body, type=MintedSession)

    async def finish_session(self, session: str, reward: float | None = None) -> dict[str, Any]:
        """End a session, and set the reward of its samples. Raises NotFound, and Conflict when it
        was finished with another reward."""
        return await self._post(f"sessions/{quote(session)}/finish", reward=reward)

    async def wait_session(self, session: str, *, seconds: float = 30.0) -> dict[str, Any]:
        """Return the session once it has ended, or after `seconds`; then its `ended` is None."""
        path = f"/v1/rl/sessions/{quote(session)}/wait?seconds={seconds}"
        return self._decode(await self._client.get(path, timeout=seconds + 30))

    async def end_session(self, session: str) -> None:
        """Delete a session and its samples."""
        await self._client.delete(f"/v1/rl/sessions/{quote(session)}")

    async def _change(self, route: str, key: str | None = None, **body: Any) -> Operation:
        response = await self._post(route, key, **body)
        return msgspec.convert(response["operation"], Operation)

    async def _post(self, route: str, key: str | None = None, **body: Any) -> dict[str, Any]:
        fields = {name: value for name, value in body.items() if value is not None}
        headers = {} if key is None else {"Idempotency-Key": key}
        response = await self._client.post(
            f"/v1/rl/{route}", msgspec.json.encode(fields), headers=headers
        )
        return self._decode(response)

    @staticmethod
    def _decode(body: bytes | bytearray) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(body)
        return fields
