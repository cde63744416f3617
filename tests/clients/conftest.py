"""A gateway before a scripted model, and real clients run as the programs they are."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens import Sample
from lockstep.tokens.shaping import Shaping
from tests.clients import rules
from tests.processes import TOKEN, ServeProcess

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("LOCKSTEP_TEST_CLIENTS") or ROOT / ".venv-clients" / "bin" / "python")
NODE_MODULES = PYTHON.parents[1] / "node_modules"
NODE = NODE_MODULES / ".bin" / "node"
PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT = 120
SHAPING = [each for each in fields(Shaping) if each.name != "end_ids"]


@dataclass(frozen=True)
class Clients:
    """Runs client programs against one gateway, and reads what became of their sessions.

    `shapes` says whether options such as top_p change what its model samples from.
    """

    served: ServeProcess
    home: Path
    shapes: bool = True

    def run(self, program: str, *arguments: str, base: str, interpreter: Path = PYTHON) -> Any:
        """What the program prints last. Its environment holds nothing of ours, and no key."""
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "OPENAI_API_KEY": "dummy",
            "OPENAI_BASE_URL": base,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "NO_PROXY": "127.0.0.1",
            "NODE_PATH": str(NODE_MODULES),
        }
        path = PROGRAMS / (program if "." in program else f"{program}.py")
        result = subprocess.run(
            [str(interpreter), str(path), base, *arguments],
            cwd=self.home, env=environ, capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
        assert result.returncode == 0, f"{program}: {result.stdout[-3000:]}{result.stderr[-6000:]}"
        return json.loads(result.stdout.strip().splitlines()[-1])

    def session(self, name: str) -> str:
        """The base URL of a session: all that such a client has to be given."""
        return f"{self.served.url}/sessions/{name}/v1"

    async def samples(self, session: str) -> list[Sample]:
        async with RemoteFleet(self.served.admin_url, token=TOKEN) as fleet:
            return await fleet.samples(session)

    async def exact_sample(self, session: str, turns: int = 3) -> Sample:
        """The one sample of a session: unbroken, of that many turns, scored again bit for bit."""
        (sample,) = await self.samples(session)
        await self.check_exact(sample)
        assert turns_of(sample) >= turns
        return sample

    async def exact_forks(self, session: str, turns: int) -> None:
        """Checks a session whose client rewrites its history: an exact sample for every turn."""
        samples = await self.samples(session)
        assert len(samples) == turns
        for at, sample in enumerate(samples):
            await self.check_exact(sample, breaks=("edited_history",)[:at])

    async def check_exact(self, sample: Sample, breaks: tuple[str, ...] = ()) -> None:
        assert sample.breaks == breaks
        assert sample.split == ()
        async with lockstep.connect(self.served.url) as policy:
            scores = (await policy.score(sample.token_ids)).logprobs
            for span in sample.shaping if self.shapes else ():
                options = {each.name: getattr(span.shaping, each.name) for each in SHAPING}
                shaped = await policy.score(
                    sample.token_ids[: span.end],
                    start=span.start,
                    temperature=sample.temperature,
                    **options,
                )
                scores[span.start : span.end] = shaped.logprobs[span.start :]
        again = [
            score if sampled else 0.0
            for score, sampled in zip(scores, sample.sampled_mask, strict=True)
        ]
        assert again == sample.logprobs


def turns_of(sample: Sample) -> int:
    """How many stretches of the sample were sampled."""
    mask = [False, *sample.sampled_mask]
    return sum(not before and now for before, now in pairwise(mask))


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: make test-clients installs it")
    home = tmp_path_factory.mktemp("clients")
    script = rules.write(home / "script.jsonl")
    served = ServeProcess("--sessions", "memory", "--worker-args", f"--script {script}")
    yield Clients(served, home, shapes=False)
    served.stop()


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """A gateway before the embedded engine with the bundled dense model."""
    home = tmp_path_factory.mktemp("dense")
    served = ServeProcess("--sessions", "memory", "--checkpoint-root", str(home))
    yield Clients(served, home)
    served.stop()


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """The same with the bundled mixture of experts, which returns the experts of every request."""
    served = ServeProcess(
        "--sessions", "memory", "--worker-args", "--return-routed-experts", model="tiny-moe"
    )
    yield Clients(served, tmp_path_factory.mktemp("moe"))
    served.stop()


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    """A session id of this test's own."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)
