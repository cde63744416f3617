"""Replays a recorded run against the gateway, in front of an engine that says what was said then.

The agent is the recording: it sends what it sent, with our ids in place of those it was given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from lockstep.engine import Engine, EngineOptions
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.server.server import listen, serving, url_of
from lockstep.models import bundled
from lockstep.scripted.core import ScriptedCore
from lockstep.scripted.responder import Responder
from lockstep.scripted.script import Rule, Script, ScriptedCall, ScriptedError
from lockstep.tokens import Sample
from lockstep.tokens.lineage import KINDS
from lockstep.worker.data import DataPlane
from tests.gateway.data_gateway import data_gateway
from tests.gateway.harness.capture import Exchange, RecordedReply, load
from tests.gateway.harness.marks import Marks, missing_turns, sound


class Replay:
    """One gateway and one scripted engine; runs are replayed one after the other."""

    def __init__(self, url: str, script: Script, engine: Engine, sessions: Sessions) -> None:
        self._script, self._engine = script, engine
        self._responder = Responder(script, bundled("tiny") or Path())
        self.renderer = self._responder.renderer
        self.sessions = sessions
        self.http = httpx.AsyncClient(base_url=url, timeout=120)

    def say(self, *rules: Rule) -> None:
        """Sets what the engine says next."""
        self._script.say(*rules)

    def reply_ids(self, rule: Rule) -> list[int]:
        """The tokens of a reply, without the one that ends it."""
        script = Script([rule])
        ids = Responder(script, bundled("tiny") or Path()).take([0]).token_ids
        return ids[:-1] if ids[-1] in self.renderer.stop_token_ids else ids

    async def run(self, name: str, *, grow: bool = True) -> list[tuple[Exchange, httpx.Response]]:
        """Sends every request of a run within a session of its name.

        Some recordings begin in mid-run: with `grow`, the requests before are sent first, as the
        history of the next one says that they were.
        """
        marks = Marks()
        answers = []
        for recorded in load(name):
            for exchange in [*(missing_turns(recorded, marks) if grow else ()), recorded]:
                self._script.say(_rule(exchange.reply))
                body = marks.mapped(exchange.body)
                if isinstance(body, dict) and "model" in body:
                    body["model"] = "tiny"
                response = await self.http.request(
                    exchange.method,
                    f"/sessions/{name}{exchange.path}",
                    json=body if exchange.method == "POST" else None,
                    headers=exchange.headers,
                )
                if response.status_code == 200 and exchange.reply.whole:
                    marks.learn(exchange, response)
            answers.append((recorded, response))
        return answers

    def breaks(self, name: str) -> dict[str, int]:
        cached = self.sessions.cache.find(name)
        return {} if cached is None else dict(cached.ledger.break_counts)

    async def samples(self, name: str, *, train: bool = False) -> list[Sample]:
        """The samples of a run, each re-scored to the bit; those of attempts that were thrown away
        train as well, unless the samples are those to `train` on."""
        samples = await self.sessions.samples(name, kinds=None if train else KINDS)
        scored = await self._engine.score_all([list(each.token_ids) for each in samples])
        for sample, scores in zip(samples, scored, strict=True):
            for at, sampled in enumerate(sample.sampled_mask):
                assert not sampled or sample.logprobs[at] == scores[at - 1]
        return samples


class _Prompter(Script):
    """A script whose rules are set before each request."""

    def say(self, *rules: Rule) -> None:
        self.rules[:] = rules
        self._uses[:] = [0] * len(rules)


def _rule(reply: RecordedReply) -> Rule:
    if reply.status != 200:
        status = reply.status if reply.status in (400, 401, 404, 413, 429) else 500
        return Rule(error=ScriptedError(status=status))
    calls = [
        ScriptedCall(name=each["name"], arguments=sound(each["arguments"])) for each in reply.calls
    ]
    error = None if reply.whole else ScriptedError(after_tokens=2)
    return Rule(say=reply.text, think=reply.thought, calls=calls, error=error)


@asynccontextmanager
async def replaying() -> AsyncIterator[Replay]:
    """An engine in this process, its data port, and a gateway in front of it."""
    script = _Prompter([Rule()])
    options = EngineOptions(worker="scripted")
    engine = Engine(
        "tiny", options, make_core=lambda directory, given: ScriptedCore(directory, given, script)
    )
    data = DataPlane(engine, "tiny", bundled("tiny") or Path())
    with listen("127.0.0.1", 0) as data_socket:
        async with (
            engine,
            serving([(data.app, data_socket)]),
            data_gateway(url_of(data_socket)) as (url, sessions),
        ):
            replay = Replay(url, script, engine, sessions)
            try:
                yield replay
            finally:
                await replay.http.aclose()
