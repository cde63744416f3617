"""A server that breaks the contract in one place fails in that row, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.check import CheckOptions, Finding, chosen_rows, open_target, run_rows
from lockstep.models import bundled
from tests.check.broken import Fault, broken, per_choice, values_of
from tests.processes import TOKEN, WorkerProcess


async def check(options: CheckOptions, *rows: str) -> dict[str, Finding]:
    async with open_target(options) as target:
        chosen = chosen_rows(rows, mutate=options.mutate)
        return {one.id: one async for one in run_rows(target, chosen)}


def shifted(choice: dict[str, Any]) -> dict[str, Any]:
    """Each token with the logprob of the one before: the names are right, the numbers are not."""
    values = values_of(choice)
    if values and isinstance(values[0], float):
        values[:] = [values[-1], *values[:-1]]
    return choice


def shortened(choice: dict[str, Any]) -> dict[str, Any]:
    del values_of(choice)[-1:]
    return choice


def louder(choice: dict[str, Any]) -> dict[str, Any]:
    values = values_of(choice)
    if values and isinstance(values[0], float):
        values[:] = [value - 0.5 for value in values]
    return choice


def abort_is_stop(choice: dict[str, Any]) -> dict[str, Any]:
    return choice | ({"finish_reason": "stop"} if choice.get("finish_reason") == "abort" else {})


def without(*names: str) -> Any:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in body.items() if key not in names}

    return change


def stop_cut(choice: dict[str, Any]) -> dict[str, Any]:
    if choice.get("finish_reason") == "stop":
        choice["token_ids"] = choice["token_ids"][:-1]
        choice["logprobs"] = {name: each[:-1] for name, each in choice["logprobs"].items() if each}
        choice["weight_versions"][-1]["end"] -= 1
    return choice


def rounded(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"token_ids": [int(token) for token in body["token_ids"]]}


def sampling(**changes: Any) -> Any:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        return body | {"sampling_params": body["sampling_params"] | changes}

    return change


def first_only(body: dict[str, Any]) -> dict[str, Any]:
    if "choices" not in body:
        return body
    first = body["choices"][0]
    return body | {"choices": [first | {"index": at} for at in range(len(body["choices"]))]}


def cut_prompt(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"token_ids": body["token_ids"][1:]}


def clamped(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"token_ids": [min(max(token, 0), 400) for token in body["token_ids"]] or [7]}


FAULTS = {
    "shifted logprobs": (
        Fault(response=per_choice(shifted)),
        "scores.again",
        "max difference",
    ),
    "logprobs missing": (
        Fault(response=per_choice(shortened), event=per_choice(shortened)),
        "tokens.aligned",
        "24 token ids but 23 logprobs",
    ),
    "abort as stop": (Fault(event=per_choice(abort_is_stop)), "tokens.abort", "finish 'stop'"),
    "no finish": (
        Fault(response=per_choice(without("finish_reason"))),
        "tokens.finish",
        "missing_finish",
    ),
    "stop id cut off": (Fault(response=per_choice(stop_cut)), "tokens.stop", "stop id"),
    "one choice n times": (Fault(response=first_only), "tokens.choices", "1 distinct"),
    "stream is not unary": (
        Fault(event=per_choice(louder)),
        "tokens.stream",
        "differ by up to 0.5",
    ),
    "prompt cut": (Fault(request=cut_prompt), "tokens.prompt", "echoed"),
    "floats accepted": (Fault(request=rounded), "input.float", "id 12.5: answered 200"),
    "negative clamped": (Fault(request=clamped), "input.negative", "id -1: answered 200"),
    "empty filled": (Fault(request=clamped), "input.empty", "no ids: answered 200"),
    "unknown fields ignored": (
        Fault(request=without("temprature")),
        "input.unknown",
        "answered 200",
    ),
    "versions missing": (
        Fault(response=per_choice(without("weight_versions"))),
        "versions.every",
        "tells no version",
    ),
    "demand ignored": (Fault(request=without("weight_version")), "versions.demand", "ignored"),
    "seed ignored": (Fault(request=sampling(seed=None)), "scores.seed", "seed 9 twice"),
    "mode mislabelled": (
        Fault(
            request=sampling(logprob_mode="processed"),
            response=lambda body: (
                body | ({"logprob_mode": "raw"} if "logprob_mode" in body else {})
            ),
        ),
        "scores.mode",
        "the server says raw",
    ),
    "supports dropped": (
        Fault(response=per_choice(lambda choice: choice | {"sampling_mask": None})),
        "scores.support",
        "no sampling_mask came",
    ),
    "prompt logprobs dropped": (
        Fault(response=without("prompt_logprobs")),
        "scores.prompt",
        "prompt logprobs were requested",
    ),
    "unknown model served": (Fault(request=without("model")), "input.model", "expected 404"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_broken_data_row_fails(worker: WorkerProcess, name: str) -> None:
    fault, row, evidence = FAULTS[name]
    async with broken(worker.url, fault) as url:
        finding = (await check(CheckOptions(url=url, transport="vllm"), row))[row]
    assert finding.verdict == "fail", finding
    assert evidence in finding.evidence


def stop_string_cut(choice: dict[str, Any]) -> dict[str, Any]:
    if isinstance(choice.get("stop_reason"), str):
        count = choice["stop_tokens"]
        choice["token_ids"] = choice["token_ids"][:-count]
        choice["logprobs"] = {
            name: each[:-count] for name, each in choice["logprobs"].items() if each
        }
        choice["weight_versions"][-1]["end"] -= count
        choice["stop_tokens"] = 0
    return choice


def with_experts(body: dict[str, Any]) -> dict[str, Any]:
    named = "routed_experts_prompt_start" in body["sampling_params"]
    return body | ({"return_routed_experts": True} if named else {})


CLIENT_FAULTS = {
    "the stop string's tokens cut": (
        Fault(response=per_choice(stop_string_cut)), "clients.stop", "cut off",
    ),
    "stop strings ignored": (Fault(request=sampling(stop=None)), "clients.stop", "24 of 24"),
    "grammars ignored": (
        Fault(request=sampling(structured_outputs=None)), "clients.structured", "one of",
    ),
    "penalties ignored": (
        Fault(request=sampling(frequency_penalty=0.0, presence_penalty=0.0)),
        "clients.penalties", "no effect",
    ),
    "overlong in other words": (
        Fault(error=lambda body: {"error": {"message": "too long", "code": 400}}),
        "clients.overlong", "no client",
    ),
    "one temperature on all": (
        Fault(response=lambda body: body | {"temperature": 1.0}),
        "clients.temperature", "recorded as [1.0, 1.0]",
    ),
    "a start requests experts": (Fault(request=with_experts), "clients.experts", "400"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENT_FAULTS)
async def test_what_a_client_would_trip_over_fails(worker: WorkerProcess, name: str) -> None:
    fault, row, evidence = CLIENT_FAULTS[name]
    async with broken(worker.url, fault) as url:
        options = CheckOptions(url=url, transport="vllm", tokenizer=bundled("tiny"))
        finding = (await check(options, row))[row]
    assert finding.verdict == "fail", finding
    assert evidence in finding.evidence


async def test_the_proxy_itself_breaks_nothing(worker: WorkerProcess) -> None:
    async with broken(worker.url, Fault()) as url:
        findings = await check(
            CheckOptions(url=url, transport="vllm"), *{row for _, row, _ in FAULTS.values()}
        )
    assert [one for one in findings.values() if one.verdict != "pass"] == []


CONTROL_FAULTS = {
    "an update that does nothing": (
        Fault(
            swallow=(
                "/engine/commit",
                lambda body: {"status": "ok", "version": body["weight_version"]},
            )
        ),
        "weights.applied",
        "the weights are the old ones",
    ),
    "a pause that does nothing": (
        Fault(swallow=("/engine/pause_generation", lambda _: {"status": "ok"})),
        "control.queue",
        "did not wait",
    ),
    "a pause that only keeps": (
        Fault(request=lambda body: body | ({"mode": "keep"} if "mode" in body else {})),
        "control.abort",
        "had not ended",
    ),
    "no token needed": (Fault(token=TOKEN), "auth.token", "no token: 200"),
    "GET as good as POST": (
        Fault(as_post=True, request=lambda body: body or {}),
        "auth.get",
        "the server is paused",
    ),
}


@pytest.mark.parametrize("name", CONTROL_FAULTS)
async def test_a_broken_admin_row_fails(worker: WorkerProcess, checkpoint: Path, name: str) -> None:
    fault, row, evidence = CONTROL_FAULTS[name]
    async with broken(worker.system_url, fault) as admin:
        options = CheckOptions(
            url=worker.url, admin=admin, token=TOKEN, mutate=True, checkpoint=checkpoint
        )
        finding = (await check(options, row))[row]
    assert finding.verdict == "fail", finding
    assert evidence in finding.evidence
    # Whatever a row finds, it leaves the server running under its own weights.
    status, response = await worker.generate([5, 6, 7], max_tokens=1)
    assert (status, response["choices"][0]["weight_versions"][0]["version"]) == (200, "default")


def too_late(path: str) -> Fault:
    """The first call of `path` is as one that comes when there is nothing left to act upon."""
    first = [{"status": "ok"}]
    return Fault(swallow=(path, lambda _: first.pop() if first else None))


async def test_an_abort_that_comes_too_late_is_tried_again(worker: WorkerProcess) -> None:
    async with broken(worker.url, too_late("/inference/v1/abort_requests")) as url:
        findings = await check(CheckOptions(url=url, transport="vllm"), "tokens.abort")
    assert findings["tokens.abort"].verdict == "pass", findings


async def test_an_abort_that_is_ignored_fails(worker: WorkerProcess) -> None:
    ignored = Fault(swallow=("/inference/v1/abort_requests", lambda _: {"status": "ok"}))
    async with broken(worker.url, ignored) as url:
        findings = await check(CheckOptions(url=url, transport="vllm"), "tokens.abort")
    assert findings["tokens.abort"].verdict == "fail", findings
    assert "the abort stopped nothing, 2 times" in findings["tokens.abort"].evidence


async def test_an_abort_of_generations_that_arrive_whole_cannot_be_observed(
    worker: WorkerProcess,
) -> None:
    async with broken(worker.url, Fault(holds=True)) as url:
        findings = await check(CheckOptions(url=url, transport="vllm"), "tokens.abort")
    assert findings["tokens.abort"].verdict == "n.a.", findings
    assert "could not be observed" in findings["tokens.abort"].evidence


@pytest.mark.parametrize("row", ["control.keep", "control.abort"])
async def test_a_pause_that_comes_too_late_is_tried_again(worker: WorkerProcess, row: str) -> None:
    async with broken(worker.system_url, too_late("/engine/pause_generation")) as admin:
        options = CheckOptions(url=worker.url, admin=admin, token=TOKEN, mutate=True)
        finding = (await check(options, row))[row]
    assert finding.verdict == "pass", finding


async def test_a_server_that_dies_makes_errors_not_a_crash(worker: WorkerProcess) -> None:
    async with broken(worker.url, Fault(dies=True)) as url:
        findings = await check(
            CheckOptions(url=url, transport="vllm", seconds=5), "tokens.*", "input.*"
        )
    assert {one.verdict for one in findings.values()} == {"error"}
    assert len(findings) == 14


async def test_a_server_that_hangs_is_left_in_time(worker: WorkerProcess) -> None:
    status, _ = await worker.control("pause_generation", mode="keep")
    assert status == 200
    try:
        findings = await check(
            CheckOptions(url=worker.url, seconds=1), "tokens.finish", "scores.seed"
        )
    finally:
        await worker.control("resume_generation")
    assert {one.verdict for one in findings.values()} == {"error"}
    assert max(one.seconds for one in findings.values()) < 5
