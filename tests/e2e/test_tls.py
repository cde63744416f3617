"""A worker, a gateway and the command line that speak TLS with each other, and with nobody else."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.processes import ready_process

TOKEN = "tls-admin-token"
REFUSED = r"certificate required|reset|closed|EOF|Broken pipe"
CHAT = {"messages": [{"role": "user", "content": "Reverse: 402"}], "max_tokens": 2}
lockstep = partial(ready_process, token=TOKEN)


def post(url: str, body: object, context: ssl.SSLContext) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, context=context, timeout=60) as response:
        return json.load(response)


@pytest.mark.failure_mode("F42")
def test_every_link_of_a_fleet_may_be_encrypted_and_mutual(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    serves = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca)
    trusts = {"LOCKSTEP_TLS_CA": ca, "LOCKSTEP_TLS_CERT": cert, "LOCKSTEP_TLS_KEY": key}
    stranger = ssl.create_default_context(cafile=ca)
    known = ssl.create_default_context(cafile=ca)
    known.load_cert_chain(cert, key)
    with lockstep("worker", "tiny", "--arithmetic", "close", *serves) as worker:
        assert worker["url"].startswith("https://")
        for url in (f"{worker['url']}/v1/models", f"{worker['system_url']}/engine/x"):
            with pytest.raises(OSError, match=REFUSED):
                post(url, {}, stranger)
        with lockstep(
            "gateway", "--worker", f"{worker['url']},{worker['system_url']}", "--tokenizer", "tiny",
            "--port", "0", "--admin-port", "0", "--state-dir", "memory", "--json", *serves,
            **trusts,
        ) as gateway:  # fmt: skip
            data, admin = gateway["url"], gateway["admin_url"]
            answer = post(f"{data}/v1/chat/completions", CHAT, stranger)
            assert answer["choices"][0]["finish_reason"]
            with pytest.raises(OSError, match=REFUSED):
                post(f"{admin}/v1/rl/pause", {}, stranger)
            assert post(f"{admin}/v1/rl/resume", {}, known)["status"] == "resumed"
            state = subprocess.run(
                [sys.executable, "-m", "lockstep", "state", "--url", admin],
                env={**os.environ, "LOCKSTEP_ADMIN_TOKEN": TOKEN, **trusts},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert state.returncode == 0, state.stderr
            assert "serving" in state.stdout
