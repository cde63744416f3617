"""Tokens in, tokens out: sent ids are used as they are, returned ids are complete."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from uuid import uuid4

from lockstep.backends.transport import StreamDelta
from lockstep.check.inflight import in_flight
from lockstep.check.outcome import Broken, NotApplicable, require, require_same
from lockstep.check.row import RowGroup
from lockstep.check.target import Target
from lockstep.tokens import Completion

GROUP = RowGroup("tokens")
RAN_ON = 0.25
"""Part of a generation's duration after the answer to its abort, above which it was ignored."""
IGNORED = 2
"""Ignored aborts after which a server is broken; one may be a process that got no CPU time."""
REPEATS = 3
"""Further attempts with the longest generation."""


@GROUP.row("prompt", "the prompt ids are used exactly as sent", "L1 F10")
async def prompt(target: Target) -> str:
    ids = target.prompt()
    reply = await target.send_ids(ids)
    require(reply.status == 200, f"{len(ids)} ids were sent, the answer is {reply.describe()}")
    evidence = []
    if (echoed := target.dialect.echo(reply.fields)) is not None:
        require(echoed == ids, f"sent {ids[:6]}..., echoed {echoed[:6]}... ({len(echoed)} ids)")
        evidence.append("echoed the same")
    if (used := target.dialect.usage(reply.fields)) is not None:
        require(used == len(ids), f"{len(ids)} ids were sent, usage counts {used} prompt tokens")
        evidence.append(f"usage counts {used}")
    other = [*ids[:-1], ids[-1] + 1]
    completion = await target.one(ids, temperature=1.0, seed=1, max_tokens=1, logprobs=5)
    two = await target.one(other, temperature=1.0, seed=1, max_tokens=1, logprobs=5)
    require(
        completion.top_logprobs != two.top_logprobs, "another last id gives the same distribution"
    )
    evidence.append("another last id gives another distribution")
    return f"{len(ids)} ids that no text has: {', '.join(evidence)}"


@GROUP.row(
    "aligned", "one finite logprob for each sampled id, from one record", "L1 F05 F06 F07 F15"
)
async def aligned(target: Target) -> str:
    completion = await target.one(
        target.prompt(), temperature=1.0, seed=7, max_tokens=24, logprobs=2
    )
    require(
        len(completion.token_ids) == 24,
        f"24 tokens were asked for, {len(completion.token_ids)} came",
    )
    positive = [value for value in completion.logprobs if value > 0]
    require(not positive, f"{len(positive)} logprobs are above 0, such as {positive[:1]}")
    for at, (token, value) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        for other in (completion.top_logprobs or [()] * 24)[at]:
            if other.token_id == token:
                require(
                    abs(other.logprob - value) <= target.tolerance,
                    f"token {token} at {at} has logprob {value}, among the alternatives "
                    f"{other.logprob}",
                )
    return (
        f"24 ids, 24 logprobs from {min(completion.logprobs):.3f} to "
        f"{max(completion.logprobs):.3f}, each beside its own id"
    )


@GROUP.row("finish", "every response has a finish reason", "L6 F13")
async def finish(target: Target) -> str:
    completion = await target.one(target.prompt(), max_tokens=5)
    evidence = (
        f"max_tokens 5 gave {len(completion.token_ids)} tokens and finish {completion.finish!r}"
    )
    require(completion.finish == "length" and len(completion.token_ids) == 5, evidence)
    return evidence


@GROUP.row("stop", "stop ids end the response and are in it", "L1 L6")
async def stop(target: Target) -> str:
    # Not with ignore_eos: on one server it also disables stop ids.
    free = await target.one(target.prompt(), max_tokens=16, ignore_eos=False)
    ids = free.token_ids
    fresh = [at for at, token in enumerate(ids) if at and token not in ids[:at]]
    at = fresh[0] if fresh else 0
    completion = await target.one(
        target.prompt(), max_tokens=16, stop_token_ids=(ids[at],), ignore_eos=False
    )
    evidence = (
        f"stop id {ids[at]}, greedily the {at + 1}. of {len(ids)}: {len(completion.token_ids)} "
        f"tokens came, finish {completion.finish!r}, stop token {completion.stop_token}"
    )
    require(completion.token_ids == ids[: at + 1] and completion.finish == "stop", evidence)
    return f"{evidence}, included"


@GROUP.row(
    "abort", "an aborted generation says abort and keeps its tokens", "L6 F12 F45", seconds=180
)
async def abort(target: Target) -> str:
    if not target.transport.aborts_by_id:
        raise NotApplicable("this dialect has no way to abort by id; see control.abort")
    ignored: list[str] = []
    for length in (*target.lengths, *target.lengths[-1:] * REPEATS):
        try:
            attempt = await _abort(target, length)
        except NotApplicable as reason:
            late = str(reason)
            continue
        if attempt.completion.finish != "length" or len(attempt.completion.token_ids) < length:
            finish, count = attempt.completion.finish, len(attempt.completion.token_ids)
            require(finish == "abort" and count >= attempt.seen, attempt.evidence)
            return attempt.evidence
        # On a machine whose cores are all busy, the first tokens may reach this process together
        # with the last. Then the abort had nothing to stop, and only a generation that runs on
        # long after the abort was answered shows that the server ignores it.
        if attempt.share_after > RAN_ON:
            ignored.append(attempt.evidence)
        else:
            late = attempt.evidence
        if len(ignored) == IGNORED:
            raise Broken(f"{ignored[-1]}; the abort stopped nothing, {IGNORED} times")
    raise NotApplicable(
        f"could not be observed: every generation ended before its abort was answered ({late}); "
        "check again while the machine is less busy"
    )


@dataclass(frozen=True, slots=True)
class _Abort:
    """An aborted generation: how it ended, the tokens received before the abort, the part of its
    duration after the abort was answered, and a description.
    """

    completion: Completion
    seen: int
    share_after: float
    evidence: str


async def _abort(target: Target, length: int) -> _Abort:
    """Abort a generation. Raises NotApplicable if it ended before the abort could be sent."""
    name = uuid4().hex
    request = target.request(target.prompt(), max_tokens=length, request_id=name)
    async with in_flight(target, request) as running:
        seen = await running.begun()
        stopped = await target.transport.abort(name)
        answered = time.monotonic()
        completion = await running.end()
    count = "not reported" if stopped is None else str(stopped)
    evidence = (
        f"aborted after {seen} of {length} tokens: finish {completion.finish!r} with "
        f"{len(completion.token_ids)} tokens and logprobs; stopped: {count}"
    )
    return _Abort(completion, seen, running.share_after(answered), evidence)


@GROUP.row("choices", "n choices are distinct and complete", "F11")
async def choices(target: Target) -> str:
    ids, evidence = target.prompt(), ""
    if target.dialect.splits_choices:
        # Our transport sends n requests in this dialect, so the server's own n is tested here.
        body = target.dialect.body(target.card.id, ids, max_tokens=8, n=4)
        reply = await target.post(target.dialect.route, body)
        if not reply.refused:
            rows = target.dialect.ids(reply.fields) if reply.status == 200 else []
            require(
                len(rows) == 4, f"n=4 answered {reply.describe()}, with ids of {len(rows)} choices"
            )
            evidence = "n=4 in one request answered whole; "
        else:
            evidence = f"n=4 in one request is refused with {reply.status}; "
    completions = await target.transport.generate(
        target.request(ids, temperature=1.0, seed=3, n=4, max_tokens=16)
    )
    distinct = len({tuple(completion.token_ids) for completion in completions})
    lengths = [len(completion.token_ids) for completion in completions]
    indices = [completion.index for completion in completions]
    evidence += f"4 choices: {distinct} distinct, lengths {lengths}, indices {indices}"
    require(distinct > 1 and lengths == [16] * 4, evidence)
    return evidence


@GROUP.row("stream", "a streamed response equals the whole one", "L1 F44")
async def stream(target: Target) -> str:
    evidence = []
    requests = {
        "greedy": target.request(target.prompt(seed=2)),
        "seeded": target.request(target.prompt(seed=2), temperature=1.0, seed=11),
    }
    for what, request in requests.items():
        (whole,) = await target.transport.generate(request)
        deltas: list[StreamDelta] = []
        streamed: list[Completion] = []
        async with aclosing(target.transport.stream(request)) as items:
            async for item in items:
                if isinstance(item, StreamDelta):
                    deltas.append(item)
                else:
                    streamed.append(item)
        require(len(streamed) == 1, f"{what}: the stream ended with {len(streamed)} completions")
        came = [token for delta in deltas for token in delta.token_ids]
        require(
            came == streamed[0].token_ids,
            f"{what}: the events brought {len(came)} ids, the end {len(streamed[0].token_ids)}",
        )
        events = sum(1 for delta in deltas if delta.token_ids)
        evidence.append(
            require_same(whole, streamed[0], target.tolerance, what) + f" in {events} events"
        )
    return "; ".join(evidence)
