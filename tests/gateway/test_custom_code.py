"""A gateway whose tokenizer asks for code of its own does not start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.app import serve_gateway
from lockstep.gateway.options import GatewayOptions
from lockstep.tokens.errors import CustomCode


async def test_such_a_tokenizer_is_an_error_before_the_gateway_is_ready(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    options = GatewayOptions(port=0, admin_port=0, tokenizer=str(tmp_path), admin_token="t" * 16)
    stop = asyncio.Event()

    def on_ready(*_: str) -> None:
        stop.set()

    async with Pool() as pool, Fleet(pool) as fleet:
        with pytest.raises(CustomCode, match="never run: take auto_map out"):
            await serve_gateway(fleet=fleet, options=options, on_ready=on_ready, stop=stop)
    assert not stop.is_set()
