"""The dashboard in Chromium: what happens is on the page at once, and is what the API says."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.train.demo.report_page import write_report
from tests.browser.conftest import LONG, LONG_TOKENS, Agent, Live
from tests.processes import TOKEN

OPEN_SECONDS = float(os.environ.get("LOCKSTEP_TEST_OPEN_SECONDS", "60"))
SOON = 2.0
PROVED = {
    "held": "weights read back",
    "bits": "bit for bit",
    "scores": "by logprobs",
    "digest": "by digest",
}
Open = Callable[..., Any]


def detail(page: Any) -> dict[str, str]:
    """What the page says about the chosen token."""
    names = page.locator(".detail dt").all_inner_texts()
    return dict(zip(names, page.locator(".detail dd").all_inner_texts(), strict=True))


def until(page: Any, script: str, *arguments: Any, seconds: float = 20.0) -> float:
    """Waits for the script to be true in the page; how many seconds that took."""
    begun = time.monotonic()
    page.wait_for_function(script, arg=list(arguments), timeout=seconds * 1000, polling=50)
    return time.monotonic() - begun


def test_who_has_no_token_sees_nothing(new_page: Open, live: Live) -> None:
    page = new_page()
    page.goto(live.page_url)
    page.fill("input[name=token]", "not-the-token")
    page.press("input[name=token]", "Enter")
    page.get_by_text("this is not the admin token").wait_for()
    # The browser itself writes down that the server refused.
    assert all("401" in error for error in page.errors)
    page.errors.clear()
    page.fill("input[name=token]", TOKEN)
    page.press("input[name=token]", "Enter")
    page.wait_for_selector(".lane[data-worker=w0]")
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (
        True,
        "Strict",
        "/dashboard",
    )

    page.click("#logout")
    page.wait_for_selector("input[name=token]")
    assert page.locator(".lane").count() == 0
    kept = {cookie["name"]: cookie["value"]}
    answer = httpx.get(f"{live.admin_url}/dashboard/data/sessions", cookies=kept)
    assert answer.status_code == 401, "a cookie that somebody kept is of no use after the logout"


def test_a_link_of_the_command_logs_in_once(new_page: Open, live: Live) -> None:
    code = live.admin.post("/dashboard/codes", json={}).json()["code"]
    page = new_page()
    page.goto(f"{live.page_url}#code={code}")
    page.wait_for_selector(".lane[data-worker]")
    assert code not in page.url
    other = new_page()
    other.goto(f"{live.page_url}#code={code}")
    other.get_by_text("this link was used or has expired").wait_for()
    other.errors.clear()


def test_a_running_agent_an_update_and_a_death_are_on_the_page_at_once(
    logged_in: Open, live: Live, checkpoint: Path
) -> None:
    page = logged_in()
    with Agent(live, "agent"):
        took = until(page, "() => +document.querySelector('.tile .value').textContent > 0")
        assert took < 8  # its first reply, and the rate of the tick after it

        body = {"weight_dir": str(checkpoint)}
        live.admin.post("/v1/rl/update_weights", json=body).raise_for_status()
        shown = "() => document.querySelector('#version').textContent === 'step-7'"
        assert until(page, shown) < SOON
        lanes = "[...document.querySelectorAll('.lane .version')]"
        every = f"() => {lanes}.every(node => node.textContent === 'step-7')"
        assert until(page, every) < SOON
        update = page.locator(".update").first
        assert "step-7" in update.inner_text()
        assert update.locator(".phases i").count() >= 5
        assert re.search(r"[\d.]+ MB", update.inner_text())
        proof = page.locator(".lane[data-worker=w0] .proof").inner_text()
        evidence = live.state()["operations"][0]["workers"]["w0"]["evidence"]
        assert PROVED[evidence["decided_by"]] in proof
        assert ("max |Δ| 0\n" in proof) == (evidence["max_difference"] == 0)

        worker = next(each for each in live.served.workers if each["id"] == "w1")
        os.kill(worker["pid"], signal.SIGKILL)
        begun = time.monotonic()
        while next(w for w in live.state()["workers"] if w["id"] == "w1")["state"] == "serving":
            assert time.monotonic() - begun < 10
            time.sleep(0.02)
        chip = "document.querySelector('.lane[data-worker=w1] .chip').textContent"
        assert until(page, f"() => {chip} !== 'serving'") < SOON
        assert page.locator(".lane[data-worker=w1] .reason").inner_text()
        until(page, f"() => {chip} === 'serving'", seconds=60)


def test_a_session_is_in_the_table_at_once_and_found_by_its_harness(
    logged_in: Open, live: Live
) -> None:
    page = logged_in("#/sessions")
    page.wait_for_selector("tr.open")
    live.converse("table-one", 2)
    assert until(page, "() => !!document.querySelector('[data-session=table-one]')") < SOON
    row = page.locator("[data-session=table-one]")
    until(page, "() => document.querySelector('[data-session=table-one] .num').textContent === '2'")
    assert "opencode" in row.inner_text()
    assert "main" in row.inner_text()
    page.keyboard.press("/")
    page.keyboard.type("table-o")
    until(page, "() => document.querySelectorAll('tr.open').length === 1")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('table-one')")
    page.keyboard.press("Escape")
    page.wait_for_selector("input.search")


def test_the_token_view_shows_the_ids_and_logprobs_of_the_api(logged_in: Open, live: Live) -> None:
    live.converse("tokens-one", 3)
    sample = live.sample("tokens-one")
    page = logged_in("#/sessions/tokens-one")
    page.wait_for_selector(".t")
    ids = page.evaluate(
        "() => [...document.querySelectorAll('.t')].map(n => +n.title.split('id ').pop())"
    )
    assert ids == sample["token_ids"]
    own = page.evaluate(
        "() => [...document.querySelectorAll('.t')].map(n => n.classList.contains('own'))"
    )
    assert own == sample["sampled_mask"]
    versions = {at: s["version"] for s in sample["versions"] for at in range(s["start"], s["end"])}
    sampled = [at for at, mine in enumerate(sample["sampled_mask"]) if mine]
    for at in (sampled[0], sampled[len(sampled) // 2], sampled[-1]):
        page.click(f"[data-at='{at}']")
        until(
            page,
            "([at]) => document.querySelector('.detail dd').textContent.startsWith(at + ' of')",
            at,
        )
        rows = detail(page)
        assert int(rows["token id"]) == sample["token_ids"][at]
        assert float(rows["logprob"]) == sample["logprobs"][at]
        shown = float(rows["probability"].removesuffix(" %"))
        assert shown == pytest.approx(100 * math.exp(sample["logprobs"][at]), rel=1e-3)
        assert (rows["written by"], rows["trained"]) == ("assistant", "yes")
        assert rows["weights"] == versions[at]
    # The address of a token leads back to it, and the keys go on from there.
    address = page.url
    again = logged_in(address.partition("/dashboard")[2])
    until(
        again,
        "([at]) => document.querySelector('.detail dd')?.textContent.startsWith(at + ' of')",
        sampled[-1],
    )
    again.focus(".stream")
    again.keyboard.press("ArrowUp")
    until(
        again,
        "([at]) => document.querySelector('.detail dd').textContent.startsWith(at + ' of')",
        sampled[-2],
    )


def test_a_session_that_goes_on_grows_on_the_page(logged_in: Open, live: Live) -> None:
    messages = [{"role": "user", "content": "Reverse: 123"}]
    reply = live.chat("growing", messages)
    page = logged_in("#/sessions/growing")
    page.wait_for_selector(".t")
    before = page.locator(".t").count()
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And 9?"}]
    live.chat("growing", messages)
    assert until(page, "([n]) => document.querySelectorAll('.t').length > n", before) < SOON
    until(page, "([n]) => document.querySelectorAll('.t').length === n",
          len(live.sample("growing")["token_ids"]))  # fmt: skip


def test_a_prefix_break_shows_both_texts(logged_in: Open, live: Live) -> None:
    live.chat("broken", [{"role": "user", "content": "Reverse: 40213"}])
    changed = [{"role": "user", "content": "Reverse: 40213"},
               {"role": "assistant", "content": "this was never sampled"},
               {"role": "user", "content": "And 775?"}]  # fmt: skip
    live.chat("broken", changed)
    page = logged_in("#/sessions/broken")
    page.click("[data-break='1']")
    page.wait_for_selector(".sides")
    stored, sent = page.locator(".sides pre").all_inner_texts()
    assert "edited_history" in page.locator(".break").inner_text()
    assert "this was never sampled" in sent
    assert "this was never sampled" not in stored


def test_a_hundred_thousand_tokens_stay_fluent(logged_in: Open, live: Live) -> None:
    page = logged_in(f"#/sessions/{LONG}")
    page.wait_for_selector(".t", timeout=60_000)
    assert page.locator(".turns button").count() == 500
    nodes = "() => document.querySelectorAll('.t').length"
    assert page.evaluate(nodes) < 8000
    slowest = page.evaluate(
        """async () => {
            const stream = document.querySelector('.stream');
            const frame = () => new Promise(requestAnimationFrame);
            let slowest = 0;
            for (let i = 1; i <= 60; i++) {
                const begun = performance.now();
                stream.scrollTop = stream.scrollHeight * i / 60;
                await frame(); await frame();
                slowest = Math.max(slowest, performance.now() - begun);
            }
            return slowest;
        }"""
    )
    assert slowest < 1000, f"{slowest:.0f} ms for one step of scrolling"
    assert page.evaluate(nodes) < 12000
    last = LONG_TOKENS - 1
    page.goto(f"{live.page_url}#/sessions/{LONG}/branch/0/token/{last}")
    took = until(page, "([at]) => !!document.querySelector(`[data-at='${at}'].on`)", last)
    assert took < 5
    assert detail(page)["weights"] == "step-4"


def test_a_page_that_is_left_open_does_not_grow(logged_in: Open, live: Live) -> None:
    page = logged_in()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def measured() -> tuple[float, float]:
        session.send("HeapProfiler.collectGarbage")
        metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        return metrics["JSHeapUsedSize"], metrics["Nodes"]

    with Agent(live, "left-open-a", 0.0), Agent(live, "left-open-b", 0.0):
        for view in ("health", "sessions", "fleet"):  # what is loaded once is loaded
            page.goto(f"{live.page_url}#/{view}")
            page.wait_for_timeout(2500)
        page.wait_for_timeout(max(5.0, OPEN_SECONDS / 6) * 1000)
        heap, nodes = measured()
        page.wait_for_timeout(OPEN_SECONDS * 1000)
        heap_after, nodes_after = measured()
    assert nodes_after < nodes * 1.15 + 300, f"{nodes:.0f} nodes became {nodes_after:.0f}"
    assert heap_after < heap * 1.25 + 1e6, f"{heap / 1e6:.1f} MB became {heap_after / 1e6:.1f}"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_view_is_wider_than_its_window(
    logged_in: Open, live: Live, width: int, theme: str
) -> None:
    live.converse("wide-one", 1)
    page = logged_in(viewport={"width": width, "height": 844}, color_scheme=theme)
    assert page.evaluate("() => document.documentElement.dataset.theme") == theme
    for view, mark in (("fleet", ".lane[data-worker]"), ("sessions", "tr.open"),
                       ("sessions/wide-one", ".t"), ("training", ".chart"),
                       ("health", ".tile")):  # fmt: skip
        page.goto(f"{live.page_url}#/{view}")
        page.wait_for_selector(mark)
        page.wait_for_timeout(200)
        over = page.evaluate("() => document.scrollingElement.scrollWidth - innerWidth")
        assert over <= 0, f"{view} is {over} px too wide"


def test_training_is_drawn_while_it_goes_on(logged_in: Open, live: Live) -> None:
    page = logged_in("#/training")
    page.wait_for_selector(".chart svg")
    assert "step 12" in page.locator(".facts").inner_text()
    page.wait_for_selector(".reader .t")
    metrics = live.directory / "run" / "metrics.jsonl"
    last = metrics.read_text().splitlines()[-1]
    with metrics.open("a") as file:
        file.write(last.replace('"step": 12,', '"step": 13,') + "\n")
    assert (
        until(page, "() => document.querySelector('.facts').textContent.includes('step 13')") < SOON
    )


def test_the_report_draws_with_the_same_parts(new_page: Open, live: Live) -> None:
    report = write_report(live.directory / "run", live.directory / "report.html")
    page = new_page()
    page.goto(report.as_uri())
    page.wait_for_selector(".stream .t.own")
    assert page.locator(".charts figure").count() == 9
    page.focus(".stream")
    before = detail(page)["position"]
    page.keyboard.press("ArrowRight")
    until(page, "([was]) => document.querySelector('.detail dd').textContent !== was", before)
