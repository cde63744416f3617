"""Adapters of a server built on vLLM: load, unload, and check against its model list."""

from __future__ import annotations

from pathlib import Path

from lockstep.backends.admin_client import AdminClient, CallBudgets
from lockstep.protocol.common.model_card import ModelCard, ModelList
from lockstep.tokens.errors import AdapterError, BadRequest, EngineFailure, UnknownModel

UNLOAD = "/v1/unload_lora_adapter"
SERVER_INFO = "/server_info?config_format=json"
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
SUCCESS = b"Success"


class AdapterCalls:
    """Adapter calls of one server. It remembers labels, because the server knows paths only."""

    def __init__(
        self, client: AdminClient, budgets: CallBudgets, load: str, unload: str = UNLOAD
    ) -> None:
        self._client = client
        self._budgets = budgets
        self._load = load
        self._unload = unload
        self._labels: dict[str, tuple[str, str]] = {}

    async def cards(self) -> list[ModelCard]:
        """Return the base model and its adapters, as listed; an adapter's `root` is its path."""
        raw = await self._client.get("/v1/models", self._budgets.quick)
        fields = self._client.decode_object(raw, "/v1/models")
        return self._client.convert(ModelList, fields, "/v1/models").data

    async def check_proved_beside_traffic(self) -> None:
        """Raise BadRequest unless adapters can be loaded and proved during other requests.

        vLLM 0.32 that may adapt the head crashes on prompt logprobs, by which adapters are proved,
        in a batch with other requests.
        """
        raw = await self._client.get(SERVER_INFO, self._budgets.quick)
        config = self._client.decode_object(raw, SERVER_INFO).get("vllm_config")
        lora = config.get("lora_config") if isinstance(config, dict) else None
        if not isinstance(lora, dict):
            raise BadRequest(
                f"{self._client.url} serves no adapters: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                param="worker",
            )
        targets = lora.get("target_modules")
        if not targets or "lm_head" in targets:
            raise BadRequest(
                f"{self._client.url} may adapt lm_head, and would crash on prompt logprobs beside "
                f"other requests: start it with --lora-target-modules {TARGETS}",
                param="worker",
            )

    def labels(self, cards: list[ModelCard]) -> dict[str, str]:
        """Return the adapters among `cards`, with the labels of those that this driver loaded."""
        labels = self._labels
        return {
            card.id: labels[card.id][1] if labels.get(card.id, ("",))[0] == card.root else ""
            for card in cards
            if card.parent is not None
        }

    async def load(self, name: str, path: Path, label: str | None) -> str:
        """Load an adapter, or swap it in place. Raises AdapterError. The caller must drop cached
        prefixes."""

        async def load() -> ModelCard | None:
            raw = await self._post(self._load, self._load_body(name, path))
            self._check_success(self._load, raw)
            return await self._find(name)

        async def look_up() -> None:
            # The list does not show the contents of an adapter; loading it again is harmless.
            await self.cards()

        try:
            card = await self._client.exactly_once(self._load, load, look_up, self._budgets.load)
        except (UnknownModel, EngineFailure) as error:
            raise AdapterError(error.message, param="path") from None
        listed = None if card is None else card.root
        self._client.expect(listed, str(path), f"path of adapter {name!r} after {self._load}")
        self._labels[name] = (str(path), label or "")
        return label or ""

    async def unload(self, name: str) -> None:
        async def unload() -> bool:
            self._check_success(self._unload, await self._post(self._unload, {"lora_name": name}))
            return True

        async def look_up() -> bool | None:
            return True if await self._find(name) is None else None

        await self._client.exactly_once(self._unload, unload, look_up, self._budgets.quick)
        self._labels.pop(name, None)
        remaining = await self._find(name)
        listed = None if remaining is None else remaining.root
        self._client.expect(listed, None, f"path of adapter {name!r} after {self._unload}")

    async def _find(self, name: str) -> ModelCard | None:
        return next((card for card in await self.cards() if card.id == name and card.parent), None)

    def _load_body(self, name: str, path: Path) -> dict[str, object]:
        return {"lora_name": name, "lora_path": str(path), "load_inplace": True}

    async def _post(self, path: str, body: object) -> bytearray:
        return await self._client.post(path, body, self._budgets.load)

    def _check_success(self, path: str, raw: bytearray) -> None:
        # vLLM confirms with a sentence, prime-rl's server with a status.
        if not raw.lstrip(b'"').startswith(SUCCESS):
            self._client.check_status(raw, path)
