"""`python -m tests.scale.campaign`: kills under load, and whether anything answered was untrue.

Clients generate and hold conversations through gateways that they choose anew for every request.
Meanwhile gateways, the leader (also in chosen phases of an update), the store and workers are
killed, stopped and restarted, and links to a worker and to the store are cut for seconds. At the
end every answer is scored again under the weights that it names, every answered turn must be in
the samples of its session, and all agree on one version.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from lockstep.fleet.remote import RemoteFleet
from tests.faults.traffic import LABELS, SEQUENCES, Reference, Traffic, lost
from tests.processes import TOKEN
from tests.scale.campaign.deployment import Deployment
from tests.scale.campaign.link import Cut, Link
from tests.scale.replicas import ReplicaProcess

PHASES = ("stage", "pause_generation", "commit", "resume_generation")
CUTS: tuple[Cut, ...] = ("reset", "silent")
LEADER_KILLS = 2
FAILOVER_SECONDS = 5.0


@dataclass
class SpreadTraffic(Traffic):
    """Traffic whose requests go to any gateway, each to another one than the last."""

    urls: list[str] = field(default_factory=list)

    async def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        self.url = random.choice(self.urls)
        return await super()._post(path, body, headers)


@dataclass
class Campaign:
    """What was done to a deployment, and what was wrong then."""

    deployment: Deployment
    reference: Reference
    rng: random.Random
    harms: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    failovers: list[float] = field(default_factory=list)
    outcomes: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    turns: int = 0
    answers: int = 0
    refused: int = 0

    async def run(self, seconds: float) -> None:
        """Harms it for so long, one harm after the other, then judges."""
        traffic = SpreadTraffic("", "campaign", urls=self.deployment.urls())
        until = monotonic() + seconds
        async with traffic:
            await asyncio.sleep(0.5)
            for _ in range(LEADER_KILLS):
                await self._leader_kill_only(traffic)
            harms: list[Callable[[], Awaitable[None]]] = [
                self._kill_in_update, self._kill_follower, self._restart_store,
                self._kill_worker, self._sleeping_leader, self._update, self._cut_worker,
                self._cut_store,
            ]  # fmt: skip
            self.rng.shuffle(harms)
            number = 0
            while number < len(harms) or monotonic() < until:
                harm = harms[number] if number < len(harms) else self.rng.choice(harms)
                number += 1
                await self._one(harm)
        await self._judge(traffic)

    async def _one(self, harm: Callable[[], Awaitable[None]]) -> None:
        name = harm.__name__.strip("_")
        self.harms[name] += 1
        try:
            await harm()
            await self.deployment.mend()
            await self.deployment.agreed()
        except TimeoutError as error:
            self.wrong.append(f"{name}: {error}")

    # Harm

    async def _leader_kill_only(self, traffic: SpreadTraffic) -> None:
        """Kills the leader, while nobody talks to it: the others must not lose one request."""
        self.harms["leader kill only"] += 1
        leader = await self.deployment.leader()
        others = [each for each in self.deployment.gateways if each is not leader]
        traffic.urls = [each.url for each in others]
        await asyncio.sleep(1.0)  # for what is under way at the leader
        refused = traffic.refused
        leader.kill()
        died = monotonic()
        while (await others[0].admin("POST", "resume", {}))[0] != 200:
            if monotonic() - died > 2 * FAILOVER_SECONDS:
                break
            await asyncio.sleep(0.05)
        self.failovers.append(monotonic() - died)
        if self.failovers[-1] > FAILOVER_SECONDS:
            self.wrong.append(f"control was away for {self.failovers[-1]:.1f} s")
        if traffic.refused != refused:
            self.wrong.append(f"{traffic.refused - refused} requests failed without their leader")
        await self.deployment.mend()
        await self.deployment.agreed()
        traffic.urls = self.deployment.urls()

    async def _kill_in_update(self) -> None:
        """Kills the leader in one phase of an update, before or after a worker did its part."""
        leader = await self.deployment.leader()
        killed = asyncio.Event()

        async def kill() -> None:
            leader.kill()
            killed.set()

        when = self.rng.choice(("hook", "hook before"))
        injector = self.rng.choice(self.deployment.injectors)
        injector.strike(self.rng.choice(PHASES), when, hook=kill)  # type: ignore[arg-type]
        await self._update()
        injector.heal()

    async def _kill_follower(self) -> None:
        leader = await self.deployment.leader()
        self.rng.choice([each for each in self.deployment.gateways if each is not leader]).kill()
        await self._update()

    async def _restart_store(self) -> None:
        mode = self.rng.choice(("fast", "immediate"))
        await asyncio.to_thread(self.deployment.store.stop, mode)
        await asyncio.sleep(self.rng.choice((0.2, 1.0, 5.0)))
        await asyncio.to_thread(self.deployment.store.start)

    async def _kill_worker(self) -> None:
        update = asyncio.create_task(self._update())
        await asyncio.sleep(self.rng.random() * 0.1)
        self.rng.choice(self.deployment.workers).process.kill()
        await update

    async def _sleeping_leader(self) -> None:
        """The leader sleeps for longer than its lease, and wakes as if nothing had been."""
        leader = await self.deployment.leader()
        leader.kill(signal.SIGSTOP)
        await asyncio.sleep(4.5)
        leader.kill(signal.SIGCONT)

    async def _cut_worker(self) -> None:
        """No gateway reaches one worker for a while, in the midst of an update."""
        await self._cut(self.rng.choice(self.deployment.worker_links))

    async def _cut_store(self) -> None:
        """The leader, or one that follows, does not reach the store, in the midst of an update."""
        leader = await self.deployment.leader()
        at = self.deployment.gateways.index(leader)
        if self.rng.random() < 0.5:
            at = (at + 1) % len(self.deployment.gateways)
        await self._cut([self.deployment.store_links[at]])

    async def _cut(self, links: Sequence[Link]) -> None:
        update = asyncio.create_task(self._update())
        await asyncio.sleep(self.rng.random() * 0.1)
        how = min(CUTS, key=lambda each: self.cuts[each])  # by turns, so that no way is left out
        self.cuts[how] += 1
        for link in links:
            link.cut(how)
        await asyncio.sleep(self.rng.choice((0.5, 2.0, 5.0)))
        for link in links:
            link.join()
        await update

    async def _update(self) -> None:
        """Asks any gateway for another version; whatever comes of it."""
        gateway: ReplicaProcess = self.rng.choice(
            [each for each in self.deployment.gateways if each.alive]
        )
        label = self.rng.choice(LABELS)
        try:
            async with asyncio.timeout(30):
                status, _ = await gateway.update(self.reference.paths[label], label)
        except TimeoutError:
            self.wrong.append("an update had not ended after 30 s")
        else:
            self.outcomes[status] += 1

    # Judgement

    async def _judge(self, traffic: SpreadTraffic) -> None:
        self.answers, self.refused = len(traffic.answers), traffic.refused
        self.wrong += sorted(set(traffic.blamed))[:3]
        version = await self.deployment.agreed()
        for index, worker in enumerate(self.deployment.workers):
            _, body = await worker.control("probe", token_ids=[list(ids) for ids in SEQUENCES])
            held = self.reference.held(body["logprobs"])
            if (held, body["version"]) != (version, version):
                self.wrong.append(
                    f"w{index} holds {held!r} as {body['version']!r}, not {version!r}"
                )
        judged: list[Any] = list(traffic.answers)
        for name, turns in traffic.turns.items():
            gateway = self.rng.choice(self.deployment.gateways)
            async with RemoteFleet(gateway.admin_url, token=TOKEN) as fleet:
                samples = await fleet.samples(name)
            self.turns += len(turns)
            if gone := lost(turns, samples):
                self.wrong.append(f"{len(gone)} answered turns of session {name} are lost")
            judged += samples
        for answer in judged:
            if (why := await asyncio.to_thread(self.reference.wrong, answer)) is not None:
                self.wrong.append(why)

    def report(self) -> str:
        """What was done and found, in a few lines."""
        done = ", ".join(f"{count} x {name}" for name, count in sorted(self.harms.items()))
        ends = ", ".join(f"{count} x {status}" for status, count in sorted(self.outcomes.items()))
        cuts = ", ".join(f"{count} x {how}" for how, count in sorted(self.cuts.items()))
        longest = max(self.failovers, default=0.0)
        return (
            f"{done}. Links were cut {cuts}. Updates ended {ends}. {self.answers} answers and "
            f"{self.turns} turns were scored again, {self.refused} requests were refused. Control "
            f"was away for {longest:.1f} s at most after the leader's death. "
            f"{len(self.wrong)} violations."
        )
