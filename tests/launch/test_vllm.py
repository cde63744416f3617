"""The address that a vLLM server listens on: loopback, or as configured."""

from __future__ import annotations

import pytest

from lockstep.launch.vllm import command


@pytest.mark.parametrize(("place", "host"), [("8000", "127.0.0.1"), ("10.0.0.7:8000", "10.0.0.7")])
def test_the_server_listens_on_the_given_address(place: str, host: str) -> None:
    line = command("python", "tiny", place, (), cpu=True)
    assert line[line.index("--host") + 1] == host
    assert line[line.index("--port") + 1] == "8000"
