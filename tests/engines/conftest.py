"""What the tests on real engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.vllm_servers import Slot, Vllm


@pytest.fixture(scope="session")
def vllm_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    slot = Slot(tmp_path_factory.mktemp("vllm"))
    yield slot
    slot.stop()


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
    """The vLLM server that a test names as its parameter: dense or moe."""
    return vllm_slot.use(request.param)
