"""The report: figures of the run, no network access, no injected scripts."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lockstep.run_record import Run, describe
from lockstep.tokens.errors import BadRequest, NotFound
from lockstep.train.demo.report_page import render, write_report

WORKERS = ("w0", "w1")
START = 1_790_000_000.0


def write_run(directory: Path, steps: int = 30, samples: int = 4, **changes: Any) -> Path:
    """A run as the trainer writes it, with a worker that dies midway; `changes` are per step."""
    chance = random.Random(7)
    directory.mkdir(parents=True, exist_ok=True)
    at, metrics, kept, events = START + 4.0, [], [], []
    for step in range(1, steps + 1):
        share = 1 - math.exp(-step / (steps / 4))
        times = {"rollout": 1.1 + chance.random() / 4, "train": 0.5, "update": 0.22}
        at += sum(times.values())
        reward = 0.42 + 0.52 * share + chance.uniform(-0.03, 0.03)
        version = f"step-{step}"
        metrics.append(
            {
                "step": step, "reward": reward, "reward_std": 0.35 * (1 - share) + 0.05,
                "solved": max(0.0, reward - 0.05), "tokens": 3000 + step,
                "tokens_per_second": 2100 + chance.uniform(-200, 200), "mismatch_kl": 0.0,
                "compared_logprobs": 900, "unequal_logprobs": 0,
                "masked_mismatch_kl": 0.0, "is_masked": 0.0, "is_masked_low": 0.0,
                "is_masked_high": 0.0, "entropy": 0.4 * (1 - share) + 0.05, "loss": -0.01,
                "grad_norm": 0.8, "lr": 1e-4, "off_policy": 0.0, "off_policy_max": 0,
                "breaks": 0, "aborts": 0, "dropped": 0, "version": version,
                "pause_seconds": 0.004 + chance.random() / 300,
                **{f"time/{name}": value for name, value in times.items()},
                "time/step": sum(times.values()),
                "workers": [{"id": w, "version": version, "state": "serving"} for w in WORKERS],
                **changes,
            }
        )  # fmt: skip
        events.append({"time": at, "kind": "update", "step": step, "version": version})
        kept += [conversation(step, chance) for _ in range(samples)]
    half = events[len(events) // 2]["time"]
    events += [
        {"time": half, "kind": "worker_killed", "worker": "w1", "pid": 4711},
        {"time": half + 4.2, "kind": "worker_back", "worker": "w1", "version": f"step-{steps}"},
    ]
    about = {
        "config": {"loop": {"steps": steps}}, "seed": 1, "model": "tiny", "env": "calc",
        "started": START, "ended": at + 3,
        "before": {"step": 0, "reward": 0.4140625, "solved": 0.4, "prompts": 128},
        "after": {"step": steps, "reward": 0.9375, "solved": 0.93, "prompts": 128},
    }  # fmt: skip
    for name, rows in (("metrics", metrics), ("samples", kept), ("events", events)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines)
    (directory / "run.json").write_text(json.dumps(about))
    return directory


def conversation(step: int, chance: random.Random, question: str = "What is 417 + 86?") -> Any:
    parts = [
        ("template", False, ["<|im_start|>", "system", "\n"]),
        ("system", False, ["You ", "have a ", "calculator."]),
        ("template", False, ["<|im_end|>", "\n", "<|im_start|>", "user", "\n"]),
        ("user", False, re.findall(r"\w+ ?|\W", question)),
        ("template", False, ["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]),
        ("assistant", True, ["<tool_call>", "\n", '{"name": ', '"calc"', ', "arguments": ',
                             '{"expression": ', '"', "4", "1", "7", " +", " ", "8", "6", '"}}',
                             "\n", "</tool_call>", "<|im_end|>"]),
        ("template", False, ["\n", "<|im_start|>", "user", "\n", "<tool_response>", "\n"]),
        ("tool", False, ["5", "0", "3"]),
        ("template", False, ["\n", "</tool_response>", "<|im_end|>", "\n", "<|im_start|>",
                             "assistant", "\n"]),
        ("assistant", True, ["5", "0", "3", "<|im_end|>"]),
    ]  # fmt: skip
    tokens = [(text, role, own) for role, own, texts in parts for text in texts]
    logprobs = [-chance.expovariate(4.0) if own else 0.0 for _, _, own in tokens]
    return {
        "step": step,
        "env": "calc",
        "reward": 1.0,
        "token_ids": [sum(text.encode()) % 512 for text, _, _ in tokens],
        "token_strings": [text for text, _, _ in tokens],
        "sampled_mask": [own for _, _, own in tokens],
        "logprobs": logprobs,
        "trainer_logprobs": logprobs,
        "versions": [f"step-{step - 1}" if own else None for _, _, own in tokens],
        "roles": [role for _, role, _ in tokens],
    }


class Page(HTMLParser):
    """What a browser would load and run of the page, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self._data = False
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self._data = tag == "script" and ("type", "application/json") in attrs
        for name, value in attrs:
            if name.startswith("on"):
                self.handlers.append(f"{tag} {name}")
            if name in ("src", "href", "action", "data", "srcset", "poster"):
                self.links.append(str(value))

    def handle_data(self, data: str) -> None:
        if self._data:
            self.data += data
        else:
            self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._data = False


def test_the_page_loads_nothing_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path)).read_text()
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)
    assert "url(" not in text
    assert "@import" not in text
    outside = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", text)
    # a name, not an address: it is how a script asks for SVG elements, and nothing is fetched
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_the_figures_are_those_of_the_run(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path, steps=5))
    shown = " ".join(Page(render(run)).text)
    assert "0.41 → 0.94" in shown
    assert "exactly 0" in shown
    assert "all 4,500 tokens bit for bit" in shown
    assert "step-5" in shown
    assert "the same on 2 workers" in shown
    assert "worker w1 is killed (SIGKILL to process 4711)" in shown
    assert "suppressed on purpose" in shown
    data = json.loads(Page(render(run)).data)
    assert data["steps"] == [1, 2, 3, 4, 5]
    for name in ("reward", "entropy", "time/rollout", "pause_seconds"):
        assert data["series"][name] == pytest.approx([step[name] for step in run.steps])
    down = [span for span in data["lanes"][1]["spans"] if span["state"] == "down"]
    assert [span["to"] - span["from"] for span in down] == pytest.approx([4.2])


def test_a_run_with_problems_is_marked_bad(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path, steps=3, mismatch_kl=2e-7, unequal_logprobs=2,
                             is_masked=0.0013, breaks=1))  # fmt: skip
    assert not run.summary().kept
    text = render(run)
    shown = " ".join(Page(text).text)
    assert "2.00e-07" in shown
    assert "6 of 2,700 tokens differ" in shown
    assert "exactly 0" not in text[: text.index("<script")]
    assert "0.13 %" in shown
    assert text.count('class="mark bad"') == 2


def test_a_mean_that_rounds_to_zero_is_not_called_zero(tmp_path: Path) -> None:
    summary = Run.read(write_run(tmp_path, steps=3, unequal_logprobs=1)).summary()
    assert not summary.kept
    assert summary.mismatch == "0, 3 of 2,700 tokens differ"


def close_run(directory: Path, worst: float) -> Run:
    """A run in close mode whose logprobs were off by up to `worst`."""
    write_run(directory, steps=3, mismatch_kl=worst**2 / 2, mismatch_max=worst, unequal_logprobs=9)
    about = json.loads((directory / "run.json").read_text())
    about["numerics"] = {"mode": "close", "reason": "the CPU is another one", "bound": 1e-3}
    (directory / "run.json").write_text(json.dumps(about))
    return Run.read(directory)


def test_a_close_run_says_how_close_and_why(tmp_path: Path) -> None:
    run = close_run(tmp_path / "good", 5.72e-6)
    assert run.summary().kept
    mismatch = "close: max |Δ| 5.7e-06 because the CPU is another one"
    assert run.summary().mismatch == mismatch
    text = render(run)
    assert mismatch in " ".join(Page(text).text)
    assert "exactly 0" not in text[: text.index("<script")]
    far = close_run(tmp_path / "bad", 2e-3)
    assert not far.summary().kept
    assert render(far).count('class="mark bad"') == 1


def test_a_close_run_without_a_difference_is_not_called_exact(tmp_path: Path) -> None:
    run = close_run(tmp_path, 0.0)
    assert run.summary().mismatch.startswith("close: max |Δ| 0.0e+00 because")


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "]]>&amp;\u2028\u2029\x00",
    "{{7*7}}<!--data--><!--config-->",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_strings_stay_strings(tmp_path: Path, hostile: str) -> None:
    directory = write_run(tmp_path, steps=2, samples=1, version=hostile)
    lines = (directory / "samples.jsonl").read_text().splitlines()
    sample = json.loads(lines[0])
    sample["token_strings"][4] = hostile
    sample["env"] = sample["roles"][4] = sample["versions"][-1] = hostile
    (directory / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    about = json.loads((directory / "run.json").read_text())
    about |= {"model": hostile, "env": hostile, hostile: hostile}
    (directory / "run.json").write_text(json.dumps(about))
    with (directory / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": START, "kind": "note", hostile: hostile}) + "\n")

    clean = Page(render(Run.read(write_run(tmp_path / "clean"))))
    page = Page(render(Run.read(directory)))
    assert page.scripts == clean.scripts == 2
    assert page.handlers == []
    data = json.loads(page.data)
    assert hostile in [text for _, text in data["names"]]
    assert data["samples"][0]["env"] == hostile


def test_differences_are_taken_before_anything_is_rounded(tmp_path: Path) -> None:
    directory = write_run(tmp_path, steps=1, samples=1)
    sample = json.loads((directory / "samples.jsonl").read_text())
    at = sample["sampled_mask"].index(True)
    sample["trainer_logprobs"] = list(sample["logprobs"])
    sample["trainer_logprobs"][at] += 2**-40
    sample["trainer_logprobs"][at + 1] = float("nan")
    (directory / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    packed = json.loads(Page(render(Run.read(directory))).data)["samples"][0]
    assert packed["differences"]["0"] == pytest.approx(2**-40, rel=1e-3)
    assert packed["differences"]["1"] == "nan"
    assert set(packed["differences"]) == {"0", "1"}


def test_forty_steps_fit_and_too_many_samples_are_thinned_out_evenly(tmp_path: Path) -> None:
    usual = write_report(write_run(tmp_path / "usual", steps=40, samples=8))
    assert usual.stat().st_size < 1_000_000
    run = Run.read(write_run(tmp_path / "flood", steps=40, samples=150))
    text = render(run)
    assert len(text) < 3_000_000
    data = json.loads(Page(text).data)
    assert data["left_out"] == len(run.samples) - len(data["samples"]) > 0
    assert {sample["step"] for sample in data["samples"]} == set(range(1, 41))


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    directory = write_run(tmp_path, steps=3)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert len(Run.read(directory).steps) == 3
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(BadRequest, match=r"line 4 of .*metrics\.jsonl is not JSON"):
        Run.read(directory)


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(BadRequest, match="no steps yet"):
        write_report(tmp_path)


def test_an_unknown_event_is_described_with_all_its_fields() -> None:
    assert describe({"time": 1, "kind": "lease_ended", "after": 3}) == "lease ended: after 3"
