"""`lockstep demo`: one worker, one answer, and a change of weights in the middle of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lockstep.engine.config import ModelConfig
from lockstep.models import bundled
from lockstep.tokens.errors import EngineFailure, NotFound

COLOURS = ("cyan", "yellow")


class Worker:
    """A running worker process, asked over real HTTP."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self.ready = ready
        self._token = Path(ready["admin_token_file"]).read_text()

    def generate(self, ids: list[int], **params: Any) -> dict[str, Any]:
        body = {"token_ids": ids, "sampling_params": {"logprobs": 0, **params}}
        return self._post(f"{self.ready['url']}/inference/v1/generate", body)

    def stream(self, ids: list[int], **params: Any) -> Iterator[dict[str, Any]]:
        body = {"token_ids": ids, "stream": True, "sampling_params": {"logprobs": 0, **params}}
        with self._open(f"{self.ready['url']}/inference/v1/generate", body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def control(self, method: str, **body: Any) -> dict[str, Any]:
        return self._post(f"{self.ready['system_url']}/engine/{method}", body)

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._open(url, body) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def _open(self, url: str, body: dict[str, Any]) -> Any:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=120)


@contextmanager
def started(model: str) -> Iterator[Worker]:
    """A worker process that lives as long as the block."""
    command = [sys.executable, "-m", "lockstep", "worker", model, "--max-model-len", "512"]
    environ = {k: v for k, v in os.environ.items() if k != "LOCKSTEP_ADMIN_TOKEN"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise EngineFailure("the worker ended before it was ready; see its message above")
            yield Worker(json.loads(line))
        finally:
            process.terminate()


def run_demo(model: str, console: Console | None = None) -> None:
    """Shows tokens with logprobs and versions, before, during and after a change of weights."""
    console = console or Console()
    directory = bundled(model) or Path(model)
    if not directory.is_dir():
        raise NotFound(f"{model!r} is neither a bundled model nor a directory")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    question = "<|im_start|>user\nReverse: 40213<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(question, add_special_tokens=False).ids
    vocab = ModelConfig.read(directory).vocab_size

    console.rule("[bold]Lockstep")
    begun = time.perf_counter()
    with started(model) as worker, tempfile.TemporaryDirectory() as scratch:
        ready = worker.ready
        console.print(
            f"Worker [b]{ready['model']}[/] is up after {time.perf_counter() - begun:.1f} s at "
            f"{ready['url']}, weights [b]{ready['version']}[/], arithmetic [b]{ready['arithmetic']}"
        )
        console.print(f"\n[b]1. Tokens in, tokens out.[/] The prompt is {len(prompt)} ids.")
        answer = worker.generate(prompt, seed=1, max_tokens=16)["choices"][0]
        _show(console, tokenizer, answer["token_ids"], answer["logprobs"]["content"],
              answer["weight_versions"], answer["finish_reason"])  # fmt: skip

        console.print("\n[b]2. New weights, staged beside the live ones while it serves.[/]")
        checkpoint = _perturbed(directory, Path(scratch) / "step-1")
        begun = time.perf_counter()
        staged = worker.control("stage", model_path=str(checkpoint), weight_version="step-1")
        seconds = time.perf_counter() - begun
        console.print(
            f"Staged {staged['bytes'] / 1e6:.1f} MB as [b]{staged['staged']}[/] in "
            f"{seconds * 1e3:.0f} ms; still serving [b]{staged['version']}"
        )

        console.print("\n[b]3. Committed in the middle of an answer.[/]")
        ids, entries = [], []
        versions, finish = [], ""
        params = {"seed": 2, "max_tokens": 200, "ignore_eos": True}
        for chunk in worker.stream(prompt, **params):
            choice = chunk["choices"][0]
            ids += choice["token_ids"]
            entries += choice["logprobs"]["content"]
            if len(ids) == 8:
                begun = time.perf_counter()
                worker.control("commit", weight_version="step-1")
                pause = time.perf_counter() - begun
            if choice["finish_reason"]:
                versions, finish = choice["weight_versions"], choice["finish_reason"]
        _show(console, tokenizer, ids, entries, versions, finish, most=48)
        spans = ", ".join(f"{v['version']} from {v['start']} to {v['end']}" for v in versions)
        console.print(
            f"The commit took {pause * 1e3:.1f} ms. Every token carries the version it was sampled "
            f"under: {spans}."
        )

        console.print("\n[b]4. Proved.[/] The engine scores its own tokens again, as a prompt.")
        split = versions[-1]["start"]
        scored = worker.control("probe", token_ids=[prompt + ids])["logprobs"][0]
        after = [entry["logprob"] for entry in entries[split:]]
        again = scored[len(prompt) + split - 1 :]
        equal = sum(a == b for a, b in zip(after, again, strict=True))
        console.print(
            f"{equal} of {len(after)} logprobs under [b]{versions[-1]['version']}[/] are the same "
            f"numbers bit for bit ({vocab} logits each, batch and cache notwithstanding)."
        )


def _perturbed(source: Path, target: Path) -> Path:
    """A checkpoint of the same model with every matrix slightly changed."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    changed = {
        name: tensor + 0.05 * tensor.std() * torch.randn_like(tensor) if tensor.ndim > 1 else tensor
        for name, tensor in tensors.items()
    }
    target.mkdir()
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def _show(
    console: Console,
    tokenizer: Any,
    ids: list[int],
    entries: list[dict[str, Any]],
    versions: list[dict[str, Any]],
    finish: str,
    most: int = 200,
) -> None:
    """Each token in the colour of its version, with its logprob."""
    line = Text("  ")
    for at, (token, entry) in enumerate(zip(ids[:most], entries, strict=False)):
        span = next(i for i, v in enumerate(versions) if v["start"] <= at < v["end"])
        colour = COLOURS[span % len(COLOURS)]
        word = tokenizer.decode([token], skip_special_tokens=False)
        line.append(repr(word)[1:-1], style=f"bold {colour}")
        line.append(f" {entry['logprob']:.2f}  ", style="dim")
    line.append("... " if len(ids) > most else "")
    line.append(f"({finish})", style="italic")
    console.print(line)
