"""`lockstep serve --engine vllm`: a gateway and a fleet in front of a real vLLM server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import lockstep
from lockstep.fleet.remote import RemoteFleet
from lockstep.models import bundled
from lockstep.tokens.errors import LockstepError
from tests.engines import vllm_models as models
from tests.engines.vllm_models import TOLERANCE, Reference
from tests.engines.vllm_servers import OPTIONS, PYTHON, Slot
from tests.processes import TOKEN, ServeProcess

pytestmark = pytest.mark.timeout(400)


class Served:
    def __init__(self, room: Path) -> None:
        source = bundled("tiny")
        assert source is not None
        self.a = models.random(source, room / "a", seed=21)
        self.b = models.random(source, room / "b", seed=22)
        models.probe(self.b).write(self.b / "probe.safetensors")
        self.gateway = ServeProcess(
            "--engine", "vllm", "--sessions", "memory", "--", *OPTIONS,
            model=str(self.a), LOCKSTEP_VLLM_PYTHON=str(PYTHON),
        )  # fmt: skip


@pytest.fixture(scope="module")
def served(vllm_slot: Slot, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: run scripts/install-vllm.sh")
    vllm_slot.stop()
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.gateway.stop()


async def test_a_chat_and_a_proved_update_go_through_the_gateway(served: Served) -> None:
    async with RemoteFleet(served.gateway.admin_url, token=TOKEN) as fleet:
        for path, version in ((served.a, "default"), (served.b, "step-1")):
            if version != "default":
                await fleet.update_weights(path, version)
            async with lockstep.connect(
                served.gateway.url, tokenizer=served.a, max_tokens=16
            ) as policy:
                chat = policy.chat()
                for text in ("Reverse: 40213", "And 77?"):
                    await chat.send(text)
                sample = chat.sample()
            right = Reference(path).score(sample.token_ids)
            for at, sampled in enumerate(sample.sampled_mask):
                if sampled:
                    assert abs(sample.logprobs[at] - right[at - 1]) <= TOLERANCE
            assert {span.version for span in sample.versions} == {version}


@pytest.mark.failure_mode("F28")
async def test_an_update_whose_probe_is_not_met_is_rolled_back(
    served: Served, tmp_path: Path
) -> None:
    wrong = models.random(served.a, tmp_path / "wrong", seed=23)
    models.probe(served.b).write(wrong / "probe.safetensors")
    async with RemoteFleet(served.gateway.admin_url, token=TOKEN) as fleet:
        before = (await fleet.state())["version"]
        with pytest.raises(LockstepError, match="off by"):
            await fleet.update_weights(wrong, "wrong")
        assert (await fleet.state())["version"] == before
    async with lockstep.connect(served.gateway.url, tokenizer=served.a) as policy:
        (done,) = await policy.generate([5, 6, 7], max_tokens=8)
    assert {span.version for span in done.versions} == {before}


def test_a_gateway_that_is_killed_leaves_no_server_behind(served: Served) -> None:
    """The last of this module: the gateway is gone after it."""
    gateway = psutil.Process(served.gateway.process.pid)
    children = gateway.children(recursive=True)
    assert len(children) >= 3
    gateway.kill()
    deadline = time.monotonic() + 60
    while alive := [one for one in children if one.is_running() and one.status() != "zombie"]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.5)
