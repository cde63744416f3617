"""Chats with a model that has more embedding rows than its tokenizer has ids."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from torch.nn.functional import pad

from lockstep.models import bundled
from tests.engine.checkpoints import edit_json, save, tensors_of
from tests.gateway.chat.chat_server import Served
from tests.processes import WorkerProcess

PADDED = [600, 601]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker with 640 embedding rows and a tokenizer of 512 ids."""
    directory = tmp_path_factory.mktemp("padded") / "tiny"
    shutil.copytree(bundled("tiny"), directory)
    tensors = tensors_of(directory)
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = pad(rows, (0, 0, 0, 640 - len(rows)))
    save(bundled("tiny"), directory, tensors)
    edit_json(directory / "config.json", vocab_size=640)
    worker = WorkerProcess(model=str(directory))
    yield worker
    worker.stop()


@pytest.mark.failure_mode("F40")
async def test_a_sampled_padding_id_has_empty_text_and_valid_logprobs(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "allowed_token_ids": PADDED,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    response = await served.post(**body)
    (choice,) = response["choices"]
    assert set(choice["token_ids"]) <= set(PADDED)
    assert choice["message"]["content"] in (None, "")
    for entry in choice["logprobs"]["content"]:
        assert (entry["token"], entry["bytes"]) == ("", [])
        assert [(top["token"], top["bytes"]) for top in entry["top_logprobs"]] == [("", [])] * 2
        assert entry["logprob"] <= 0
