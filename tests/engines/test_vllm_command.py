"""`lockstep serve --engine vllm`: a gateway and a fleet in front of a real vLLM server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import lockstep
from lockstep.fleet.remote import RemoteFleet
from lockstep.launch import vllm as vllm_server
from lockstep.launch.interpreter import VLLM, find_python
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest, LockstepError
from tests.engines import vllm_models as models
from tests.engines.vllm_models import TOLERANCE, Reference
from tests.engines.vllm_servers import OPTIONS, PYTHON, Slot
from tests.processes import TOKEN, ServeProcess

pytestmark = pytest.mark.timeout(400)


class Served:
    def __init__(self, folder: Path) -> None:
        source = bundled("tiny")
        assert source is not None
        self.a = models.random(source, folder / "a", seed=21)
        self.b = models.random(source, folder / "b", seed=22)
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


def test_the_server_gets_the_flags_and_the_environment_that_lockstep_needs() -> None:
    wanted = ["--max-model-len", "64", "--enable-lora"]
    started = vllm_server.command("python", "tiny", "8100", wanted, cpu=True)
    assert started[-3:] == wanted
    assert {"--enable-scale-out", "--enforce-eager", "127.0.0.1"} <= set(started)
    assert started[started.index("--dtype") + 1] == "float32"  # bf16 dies where AMX is forbidden
    assert "--dtype" not in vllm_server.command("python", "tiny", "8100", wanted, cpu=False)
    environ = vllm_server.environment({"VLLM_CPU_KVCACHE_SPACE": "4"}, wanted, cpu=True)
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "4"  # what the user set stays
    assert environ["VLLM_SERVER_DEV_MODE"] == environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in vllm_server.environment({}, wanted, cpu=False)
    with pytest.raises(BadRequest, match="--port is set by lockstep"):
        vllm_server.check_arguments(["--port=1"])
    with pytest.raises(BadRequest, match=r"install-vllm\.sh"):
        find_python(VLLM, "/nowhere/python")


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
        (completion,) = await policy.generate([5, 6, 7], max_tokens=8)
    assert {span.version for span in completion.versions} == {before}


@pytest.mark.failure_mode("F26")
async def test_a_server_that_dies_comes_back_with_the_weights_of_the_fleet(served: Served) -> None:
    async with RemoteFleet(served.gateway.admin_url, token=TOKEN) as fleet:
        wanted = (await fleet.state())["version"]
        if wanted != "step-1":
            await fleet.update_weights(served.b, "step-1")
        for one in psutil.Process(served.gateway.process.pid).children(recursive=True):
            if "api_server" in " ".join(one.cmdline()):
                one.kill()
        async with asyncio.timeout(30):
            while (await fleet.state())["serving"]:
                await asyncio.sleep(0.2)
        async with asyncio.timeout(300):
            while not (await fleet.state())["serving"]:
                await asyncio.sleep(1.0)
        (worker,) = (await fleet.state())["workers"]
        assert (worker["state"], worker["version"]) == ("serving", "step-1")
    async with lockstep.connect(served.gateway.url, tokenizer=served.a) as policy:
        (completion,) = await policy.generate([5, 6, 7], max_tokens=8)
    right = Reference(served.b).score([5, 6, 7, *completion.token_ids])[2:]
    assert max(abs(p - q) for p, q in zip(completion.logprobs, right, strict=True)) <= TOLERANCE
    assert {span.version for span in completion.versions} == {"step-1"}


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
