"""Makes the pictures of docs/dashboard.md: a live fleet, agents, updates and a lost worker."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.browser.conftest import CHROMIUM, TOKEN, Live, write_checkpoint
from tests.processes import ServeProcess
from tests.train.demo.test_report import write_run

DOCS = Path(__file__).parents[2] / "docs"
TASKS = ("Reverse: 40213", "What is 417 + 86?", "Reverse: 99812", "What is 12 * 12?")
KINDS = ("swe", "math", "web")
HARNESSES = ("opencode/1.18.33", "codex_cli_rs/0.166.0", "OpenAI/Python 3.0.0")


def play(live: Live, number: int, stop: threading.Event) -> None:
    """Sessions of one agent, some of which rewrite their history."""
    at = 0
    while not stop.is_set():
        at += 1
        messages: list[Any] = [
            {"role": "system", "content": "Solve one small problem after the other."},
            {"role": "user", "content": TASKS[(number + at) % len(TASKS)]},
        ]
        headers = {"user-agent": HARNESSES[(number + at) % len(HARNESSES)]}
        for turn in range(2 + (number + at) % 4):
            body = {"model": "tiny", "messages": messages, "max_tokens": 32}
            name = f"{KINDS[number % 3]}-{number}{at:03d}"
            path = f"/sessions/{name}/v1/chat/completions"
            response = live.data.post(path, json=body, headers=headers)
            if response.is_error:
                break
            reply = response.json()["choices"][0]["message"]["content"] or ""
            if turn == 2 and at % 3 == 0:
                reply += " (shortened)"
            messages += [{"role": "assistant", "content": reply},
                         {"role": "user", "content": TASKS[(at + turn) % len(TASKS)]}]  # fmt: skip
            stop.wait(0.25)


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="lockstep-screenshots-") as scratch:
        directory = Path(scratch)
        run = write_run(directory / "run", steps=24)
        served = ServeProcess("--workers", "3", "--state-dir", "memory", "--run-dir", str(run))
        live, stop = Live(served, directory), threading.Event()
        agents = [threading.Thread(target=play, args=(live, at, stop)) for at in range(4)]
        try:
            checkpoint = write_checkpoint(directory)
            for agent in agents:
                agent.start()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=CHROMIUM, args=["--no-sandbox"]
                )
                take(browser, live, checkpoint)
                browser.close()
        finally:
            stop.set()
            for agent in agents:
                agent.join(30)
            served.stop()


def take(browser: Any, live: Live, checkpoint: Path) -> None:
    """Every picture, in the order in which things happen."""
    laptop = opened(browser, live, "light", 1280, 800)
    dark = opened(browser, live, "dark", 1280, 800)
    phone = opened(browser, live, "light", 390, 844, 2)
    time.sleep(25)
    for name in ("step-6", "step-7"):
        body = {"weight_dir": str(checkpoint), "version": name}
        live.admin.post("/v1/rl/update_weights", json=body).raise_for_status()
        time.sleep(12)
    os.kill(live.served.workers[2]["pid"], signal.SIGKILL)
    laptop.wait_for_function(
        "() => document.querySelector('.lane[data-worker=w2] .chip').textContent !== 'serving'"
    )
    time.sleep(1.5)
    for page, name in ((laptop, "fleet"), (dark, "fleet-dark"), (phone, "fleet-phone")):
        save(page, name)
    broken = next(
        row["info"]["id"]
        for row in live.admin.get("/dashboard/data/sessions?limit=200").json()["rows"]
        if row["breaks"] and row["info"]["turns"] > 3
    )
    for page, where, mark, name in (
        (laptop, "sessions", "tr.open", "sessions"),
        (dark, f"sessions/{broken}", ".t.own", "session-dark"),
        (laptop, f"sessions/{broken}", ".t.own", "session"),
        (phone, f"sessions/{broken}", ".t.own", "session-phone"),
        (laptop, "training", ".reader .t", "training"),
        (dark, "health", ".tile", "health-dark"),
        (phone, "health", ".tile", "health-phone"),
    ):
        page.goto(f"{live.page_url}#/{where}")
        page.wait_for_selector(mark)
        page.wait_for_timeout(1200)
        if name == "session":
            page.click("[data-break]")
            page.wait_for_selector(".sides")
            page.set_viewport_size({"width": 1280, "height": 1180})
            page.select_option(".paint select", "logprob")
            page.wait_for_timeout(600)
        save(page, name)
        page.set_viewport_size({**page.viewport_size, "height": 844 if page is phone else 800})


def opened(browser: Any, live: Live, theme: str, width: int, height: int, scale: int = 1) -> Any:
    """A page that is logged in."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=scale
    )
    page = context.new_page()
    page.goto(live.page_url)
    page.fill("input[name=token]", TOKEN)
    page.press("input[name=token]", "Enter")
    page.wait_for_selector(".lane[data-worker]")
    return page


def save(page: Any, name: str) -> None:
    page.screenshot(path=DOCS / f"dashboard-{name}.png")


if __name__ == "__main__":
    main()
