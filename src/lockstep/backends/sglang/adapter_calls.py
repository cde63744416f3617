"""Adapters of an SGLang server: load, unload, and check against its model list."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lockstep.backends.admin_client import AdminClient, CallBudgets
from lockstep.backends.vllm.adapter_calls import AdapterCalls
from lockstep.checkpoint.safetensors_file import TensorFile
from lockstep.tokens.errors import AdapterError, EngineFailure

WEIGHTS = "adapter_model.safetensors"


def check_fused(path: Path) -> None:
    """Raise AdapterError for an adapter of up_proj without gate_proj.

    SGLang fuses the two by the name of the second. Loading such an adapter ended its process.
    """
    names = {entry.name for entry in TensorFile.read(path / WEIGHTS).entries}
    for name in sorted(names):
        if ".up_proj." in name and name.replace(".up_proj.", ".gate_proj.") not in names:
            raise AdapterError(
                f"{path} adapts {name} and not gate_proj, which SGLang cannot load: train it with "
                "both in target_modules, or with neither",
                param="path",
            )


class SglangAdapterCalls(AdapterCalls):
    """Adapter calls of one SGLang server, which does not replace an adapter in place."""

    def __init__(self, client: AdminClient, budgets: CallBudgets) -> None:
        super().__init__(client, budgets, "/load_lora_adapter", "/unload_lora_adapter")

    async def load(self, name: str, path: Path, label: str | None) -> str:
        """Load an adapter; one of that name is unloaded first. Raises AdapterError.

        In between, and when the load fails, requests for the name are rejected: SGLang serves
        nothing in its place.
        """
        await asyncio.to_thread(check_fused, path)
        if await self._find(name) is not None:
            await self.unload(name)
        return await super().load(name, path, label)

    def _load_body(self, name: str, path: Path) -> dict[str, object]:
        return {"lora_name": name, "lora_path": str(path)}

    def _check_success(self, path: str, raw: bytearray) -> None:
        fields = self._client.decode_object(raw, path)
        if fields.get("success") is not True:
            raise EngineFailure(f"{self._client.url} {path}: {fields.get('error_message')}")
