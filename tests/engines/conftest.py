"""What the tests on real engines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import sglang_servers
from tests.engines.sglang_servers import Sglang
from tests.engines.vllm_servers import Slot, Vllm

HERE = str(Path(__file__).parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of one vLLM server next to each other: starting one takes half a minute."""
    places = [at for at, item in enumerate(items) if str(item.path).startswith(HERE)]
    tests = sorted((items[at] for at in places), key=_server_of)
    for at, item in zip(places, tests, strict=True):
        items[at] = item


def _server_of(item: pytest.Item) -> str:
    """The server of `vllm_slot` that a test uses; empty for none."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    names = {*getattr(item, "fixturenames", ()), parameters.get("server", "")}
    return next((kind for kind in ("dense-bf16", "dense", "moe") if kind in names), "")


@pytest.fixture(scope="session")
def vllm_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    slot = Slot(tmp_path_factory.mktemp("vllm"))
    yield slot
    slot.stop()


@pytest.fixture(scope="session")
def sglang(vllm_slot: Slot, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """A real SGLang server of a model with tied embeddings, with adapters switched on."""
    require_sglang(vllm_slot)
    running = Sglang.start(tmp_path_factory.mktemp("sglang"))
    yield running
    running.server.stop()


def require_sglang(vllm_slot: Slot) -> None:
    """Skip without SGLang's environment; else make room: no vLLM server runs beside it."""
    if not sglang_servers.PYTHON.exists():
        pytest.skip(f"{sglang_servers.PYTHON} is not there: run scripts/install-sglang.sh")
    vllm_slot.stop()


@pytest.fixture
def dense(vllm_slot: Slot) -> Vllm:
    """A vLLM server of a model with tied embeddings, with adapters switched on."""
    return vllm_slot.use("dense")


@pytest.fixture
def moe(vllm_slot: Slot) -> Vllm:
    """A vLLM server of a mixture of experts."""
    return vllm_slot.use("moe")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, vllm_slot: Slot) -> Vllm:
    """The vLLM server that a test names as its parameter: dense, dense-bf16 or moe."""
    return vllm_slot.use(request.param)
