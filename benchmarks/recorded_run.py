"""A recorded run beside one that records nothing, and its replay: one table.

    python -m benchmarks.recorded_run                                   # the bundled model, a CPU
    python -m benchmarks.recorded_run --shape 0.6b --device cuda --dtype bfloat16

Runs alternate, so that both meet the same machine. The replay repeats every step of a recorded run,
samples its tokens again and compares all digests. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.gpu_served import gateway

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},  # the bundled model
    "0.6b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
}  # fmt: skip


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory(prefix="recorded-run-") as scratch:
        where = Path(scratch)
        model = make_model(options, where / "model")
        seconds: dict[str, list[float]] = {"recorded": [], "not recorded": []}
        with served(options, model, where / "serve.log") as ready:
            # The first run compiles the kernels of a GPU.
            train(options, ready, model, where / "first", steps=2)
            for turn in range(options.rounds):
                for name in seconds:
                    run = where / f"{name.replace(' ', '-')}-{turn}"
                    with nullcontext() if name == "recorded" else recording_nothing():
                        seconds[name] += train(options, ready, model, run, steps=options.steps)
                    if turn or name != "recorded":
                        shutil.rmtree(run)
        show(options, seconds, where / "recorded-0")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="limit of a response")
    return parser.parse_args()


def make_model(options: argparse.Namespace, directory: Path) -> Path:
    """Return the directory of the model: the bundled one, or random weights of a shape."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lockstep.models import model_directory

    tiny = model_directory("tiny")
    shutil.copytree(tiny, directory)
    if shape := SHAPES[options.shape]:
        own = json.loads((tiny / "config.json").read_text())
        ids = {name: own[name] for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
        torch.manual_seed(0)
        config = Qwen3Config(
            **shape, **ids, vocab_size=own["vocab_size"], max_position_embeddings=4096,
            tie_word_embeddings=True,
        )  # fmt: skip
        # The bundled tokenizer has no ids for a larger vocabulary, so its rows are left out.
        (directory / "model.safetensors").unlink()
        random = Qwen3ForCausalLM(config).to(getattr(torch, options.dtype))
        random.save_pretrained(directory)
    return directory


@contextmanager
def served(options: argparse.Namespace, model: Path, log: Path) -> Iterator[dict[str, Any]]:
    """Serve the model for the block; yield the ready line of the gateway."""
    worker = ["--device", options.device, "--dtype", options.dtype, "--max-model-len", "512"]
    if options.device != "cpu":
        worker += ["--kv-cache-mb", "8000"]
    source = Path(__file__).parents[1] / "src"
    with gateway(model, source, log, worker=shlex.join(worker)) as ready:
        yield ready


def train(
    options: argparse.Namespace, ready: dict[str, Any], model: Path, run: Path, *, steps: int
) -> list[float]:
    """Train from the model's weights; return the seconds of every step but the first."""
    from lockstep.train import TrainConfig, Trainer

    config = TrainConfig.of(
        {
            "model": str(model), "seed": 1, "run_dir": str(run), "env": {"name": "reverse"},
            "rollout": {"groups": options.groups, "group_size": 8, "max_tokens": options.tokens},
            "loop": {"steps": steps, "keep_checkpoints": 1},
            "learner": {"device": options.device, "dtype": options.dtype, "lr": 1e-5},
            "eval": {"prompts": 0},
            "serve": {"admin_token_file": ready["admin_token_file"]},
        }
    )  # fmt: skip
    result = asyncio.run(Trainer(config, ready["url"], ready["admin_url"]).run())
    return [step.time_step for step in result.steps[1:]]


class NoRecorder:
    """Stands in for the recorder of a chain."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


class NoDigests:
    """Stands in for the digests of tensors."""

    def __init__(self, _: Any) -> None: ...

    def __enter__(self) -> NoDigests:
        return self

    def __exit__(self, *_: object) -> None: ...

    def collect(self, _: Path) -> dict[str, Any]:
        return {}


@contextmanager
def recording_nothing() -> Iterator[None]:
    with (
        patch("lockstep.train.loop.ChainRecorder", NoRecorder),
        patch("lockstep.train.learning.learner.TensorDigests", NoDigests),
    ):
        yield


def show(options: argparse.Namespace, seconds: dict[str, list[float]], run: Path) -> None:
    """Print the table, and end with 1 if the run does not replay."""
    from lockstep.replay import replay

    begun = time.perf_counter()
    outcome = asyncio.run(replay(run, fresh_rollouts=True))
    spent = time.perf_counter() - begun
    recorded, bare = median(seconds["recorded"]), median(seconds["not recorded"])
    size = sum(path.stat().st_size for path in (run / "chain").iterdir())
    size += (run / "chain.jsonl").stat().st_size
    rows = {
        "model": f"{options.shape}, {options.dtype}, {options.device}",
        "steps": f"{options.steps} of {options.groups * 8} rollouts",
        "step, recorded": f"{recorded:.3f} s",
        "step, not recorded": f"{bare:.3f} s",
        "cost of recording": f"{recorded / bare - 1:+.1%}",
        "record of a step": f"{size / options.steps / 1e3:.0f} kB",
        "replay": f"{spent:.0f} s, compared in {outcome.mode}",
        "digests and figures": f"{outcome.digests:,}",
        "rewards computed again": f"{outcome.rewards:,}",
        "tokens sampled again": f"{outcome.tokens:,} of {outcome.draws:,} draws",
        "from the record": json.dumps(outcome.from_record),
        "differences": str(len(outcome.differences)),
    }
    print("\n| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |", flush=True)
    for line in outcome.lines():
        print(line)
    sys.exit(not outcome.held)


if __name__ == "__main__":
    main()
