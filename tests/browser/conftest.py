"""A live fleet of real processes, an agent that talks to it, and Debian's Chromium in front."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.models import bundled
from lockstep.render import Renderer
from lockstep.storage.sqlite.sessions import SqliteSessionStore
from lockstep.tokens import Completion, VersionSpan
from tests.engine import checkpoints
from tests.processes import TOKEN, ServeProcess
from tests.train.demo.test_report import write_run

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("LOCKSTEP_TEST_DASHBOARD") or ROOT / ".venv-dashboard")
CHROMIUM = os.environ.get("LOCKSTEP_TEST_CHROMIUM") or "/usr/bin/chromium"
LONG, LONG_TURNS, LONG_TOKENS = "long-session", 500, 100_000
SEQUENCES = ((5, 6, 7, 8, 9, 10, 11, 12), (100, 3, 77, 41, 9))

# Playwright is in an environment of its own; what both have comes from this one.
sys.path += map(str, VENV.glob("lib/python3*/site-packages"))


class Live:
    """The gateway of a live fleet, and how to talk to it."""

    def __init__(self, served: ServeProcess, directory: Path) -> None:
        self.served, self.directory = served, directory
        self.url, self.admin_url = served.url, served.admin_url
        self.page_url = f"{served.admin_url}/dashboard"
        headers = {"authorization": f"Bearer {TOKEN}"}
        self.admin = httpx.Client(base_url=served.admin_url, headers=headers, timeout=60)
        self.data = httpx.Client(base_url=served.url, timeout=60)

    def chat(self, session: str, messages: list[Any], **more: Any) -> str:
        """One turn of a session; the text of the reply."""
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, **more}
        headers = {"user-agent": "opencode/1.18.33"}
        path = f"/sessions/{session}/v1/chat/completions"
        response = self.data.post(path, json=body, headers=headers)
        response.raise_for_status()
        return response.json()["choices"][0]["message"]["content"] or ""

    def converse(self, session: str, turns: int = 2) -> None:
        """A session with so many turns of a conversation."""
        messages: list[Any] = [{"role": "user", "content": "Reverse: 40213"}]
        for _ in range(turns):
            reply = self.chat(session, messages)
            messages += [{"role": "assistant", "content": reply},
                         {"role": "user", "content": "And 775?"}]  # fmt: skip

    def sample(self, session: str) -> dict[str, Any]:
        """The only sample of a session, as the API gives it."""
        response = self.admin.get(f"/v1/rl/sessions/{session}")
        response.raise_for_status()
        (sample,) = response.json()["samples"]
        return sample

    def state(self) -> dict[str, Any]:
        return self.admin.get("/v1/rl/state").json()


class Agent(threading.Thread):
    """Talks without end, a new session every few turns, until it is stopped."""

    def __init__(self, live: Live, name: str, pause: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._live, self._name, self._pause = live, name, pause
        self._stop_now = threading.Event()
        self.turns = 0

    def run(self) -> None:
        at = 0
        while not self._stop_now.is_set():
            at += 1
            try:
                self._live.converse(f"{self._name}-{at}", 3)
                self.turns += 3
            except httpx.HTTPError:
                time.sleep(0.2)
            self._stop_now.wait(self._pause)

    def __enter__(self) -> Agent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_now.set()
        self.join(30)


async def _write_long_session(path: Path) -> None:
    """A session of LONG_TURNS turns and LONG_TOKENS tokens, in the file of a gateway."""
    renderer = Renderer.load("tiny")
    opening = renderer.encode("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
    end = renderer.encode("<|im_end|>")
    words = renderer.encode("one more step of many, and then the next ")
    each = LONG_TOKENS // LONG_TURNS
    async with Sessions(SqliteSessionStore(str(path))) as sessions:
        ids: list[int] = []
        for turn in range(LONG_TURNS):
            session = await sessions.open(LONG, renderer)
            prompt = ids + opening
            room = each - len(opening) - len(end)
            sampled = (words * (room // len(words) + 1))[:room] + end
            plan = await session.plan_ids(prompt)
            completion = Completion(
                token_ids=sampled,
                logprobs=[-0.001 * (at % 97) - turn / 1000 for at in range(len(sampled))],
                prompt_ids=prompt,
                finish="stop",
                versions=(VersionSpan(f"step-{turn // 100}", 0, len(sampled)),),
                worker="w0",
                request_id=f"r{turn}",
            )
            message = {"role": "assistant", "content": "one more step"}
            await session.commit(plan, [(completion, message)])
            ids = prompt + sampled


def write_checkpoint(directory: Path) -> Path:
    """Weights that differ from the bundled ones, with a probe that tells them apart."""
    from lockstep.engine import EngineOptions
    from lockstep.engine.core import Core

    source = bundled("tiny")
    assert source is not None
    path = checkpoints.variant(source, directory / "step-7", seed=7, scale=1e-2)
    core = Core(source, EngineOptions(max_model_len=512, max_seqs=1))
    weights = core.served.load_weights(path, "step-7")
    rows = tuple(tuple(core.score(list(ids), weights=weights)) for ids in SEQUENCES)
    Probe(SEQUENCES, rows, 1e-4).write(path / PROBE)
    return path


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two workers behind a gateway that has a long session and a run directory."""
    directory = tmp_path_factory.mktemp("dashboard")
    store = directory / "sessions.sqlite"
    with ThreadPoolExecutor(1) as thread:  # Playwright's loop runs in this one
        thread.submit(asyncio.run, _write_long_session(store)).result()
    run = write_run(directory / "run", steps=12)
    served = ServeProcess(
        "--workers", "2", "--sessions", str(store), "--state-dir", str(directory / "state"),
        "--run-dir", str(run),
    )  # fmt: skip
    try:
        yield Live(served, directory)
    finally:
        served.stop()


@pytest.fixture(scope="session")
def checkpoint(live: Live) -> Path:
    return write_checkpoint(live.directory)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--enable-precise-memory-info"],
        )
        yield chromium
        chromium.close()


@pytest.fixture
def new_page(browser: Any, live: Live) -> Iterator[Callable[..., Any]]:
    """Opens pages. When the test ends, none may have written an error or asked another host."""
    contexts, errors, urls = [], [], []

    def open_page(**options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.errors = errors
        page.on("console", lambda entry: entry.type == "error" and errors.append(entry.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        return page

    yield open_page
    for context in contexts:
        context.close()
    foreign = [url for url in urls if not url.startswith((live.admin_url, "file://", "data:"))]
    assert not foreign, foreign
    assert not errors, errors


@pytest.fixture
def logged_in(new_page: Callable[..., Any], live: Live) -> Callable[..., Any]:
    """Opens a page of the dashboard, logged in by a code as `lockstep dashboard` does it."""

    def open_page(where: str = "#/fleet", **options: Any) -> Any:
        code = live.admin.post("/dashboard/codes", json={}).json()["code"]
        page = new_page(**options)
        page.goto(f"{live.page_url}#code={code}")
        page.wait_for_selector(".lane[data-worker]")
        if where != "#/fleet":
            page.goto(live.page_url + where)
        return page

    return open_page
