"""Plays the rollouts of a step again with the recorded completions, to compute rewards anew.

The environment renders its prompts and judges the responses; only the sampling is taken from the
record. A prompt that differs from the recorded one is found at its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.backends.transport import CompletionStream, ModelCard, Relay, TransportName
from lockstep.client.options import Options
from lockstep.client.policy import Policy
from lockstep.client.tokenizer import TokenizerSource
from lockstep.protocol.common.request import GenerateRequest
from lockstep.replay.findings import Replay
from lockstep.tokens import Completion
from lockstep.tokens.errors import Conflict, LockstepError
from lockstep.train.config import TrainConfig
from lockstep.train.envs.environment import Environment, RolloutContext, Task
from lockstep.train.learning.batch import RolloutDraw, RolloutGroup
from lockstep.train.records.step_contents import encode_reward, encode_task
from lockstep.train.rollout import rollout_options


class Rewards:
    """The environment of a run, played with recorded completions.

    Without an environment, and with one that is not deterministic, rewards are those of the record.
    """

    def __init__(self, config: TrainConfig, environment: Environment | None) -> None:
        self._config = config
        self._environment = environment
        if getattr(environment, "deterministic", False) and environment is not None:
            self._tasks = enumerate(environment.tasks("train", config.seed))
        serve = config.serve
        self._tokenizer = TokenizerSource(serve.tokenizer or config.model)

    async def check(
        self, step: int, contents: dict[str, Any], groups: Sequence[RolloutGroup], outcome: Replay
    ) -> None:
        """Compare tasks and rewards of a step with those that the environment gives now."""
        if (why := self._why_recorded()) is not None:
            name = f"rewards of the environment {self._config.env.name!r}"
            outcome.listed(f"{name}, {why}", sum(len(group.rollouts) for group in groups))
            return
        plain = contents["groups"]
        wanted = {group["number"] for group in plain}
        tasks = self._take(wanted)
        for at, (recorded, group) in enumerate(zip(plain, groups, strict=True)):
            task = tasks.get(recorded["number"])
            where = f"group {at} (task {recorded['number']})"
            if task is None or not outcome.compare(
                step, "task", recorded["task"], encode_task(task), where
            ):
                continue
            for number, rollout in enumerate(group.rollouts):
                if rollout.draws and self._environment is not None:
                    place = f"{where}, rollout {number}"
                    reward = await self._play(self._environment, task, group, number)
                    outcome.rewards += 1
                    outcome.compare(step, "reward", encode_reward(rollout.reward), reward, place)
                else:
                    outcome.listed("rollouts whose program sent its own requests")

    def _why_recorded(self) -> str | None:
        """Return why rewards are not computed again; None if they are."""
        if self._environment is None:
            return "whose code is that of the run's author and was not run (--trust-code runs it)"
        if not getattr(self._environment, "deterministic", False):
            return "which is not declared deterministic"
        return None

    def _take(self, wanted: set[int]) -> dict[int, Task]:
        """Return the tasks with these numbers; tasks before them are not needed again."""
        taken: dict[int, Task] = {}
        last = max(wanted, default=-1)
        for number, task in self._tasks:
            if number in wanted:
                taken[number] = task
            if number >= last:
                break
        return taken

    async def _play(
        self, environment: Environment, task: Task, group: RolloutGroup, number: int
    ) -> Any:
        """Return the reward of a rollout as it is recorded, or the message of its error."""
        policy = Policy(
            RecordedTransport(group.rollouts[number].draws),
            self._config.serve.model or self._config.model,
            self._tokenizer,
            Options(),
        )
        context = RolloutContext(policy, **rollout_options(self._config, group.seeds, number))
        try:
            return encode_reward(await environment.rollout(task, context))
        except LockstepError as error:
            return error.message
        except Exception as error:  # code of the user
            return f"{type(error).__name__}: {error}"


class RecordedTransport:
    """A transport that returns recorded completions to the requests they were sampled for."""

    name: TransportName = "lockstep"
    base_url = "the record"
    relay: Relay | None = None
    aborts_by_id = False
    gives_choices = True

    def __init__(self, draws: Sequence[RolloutDraw]) -> None:
        self._draws = list(draws)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the recorded choices. Raises Conflict for a request that was not recorded."""
        return [
            replace(self._find(request.alone(index)), index=index)
            for index in range(request.sampling.n)
        ]

    def _find(self, request: GenerateRequest) -> Completion:
        seed, prompt = request.sampling.seed, list(request.prompt_ids)
        for draw in self._draws:
            if draw.request.sampling.seed == seed:
                recorded = list(draw.request.prompt_ids)
                if recorded == prompt:
                    self._draws.remove(draw)
                    return draw.completion
                at = _first_difference(recorded, prompt)
                raise Conflict(
                    f"the prompt of the turn with seed {seed} differs from the recorded one at "
                    f"token {at}"
                )
        raise Conflict(f"no turn with seed {seed} was recorded")

    def stream(self, request: GenerateRequest) -> CompletionStream:
        raise Conflict("a recorded rollout cannot be streamed")

    async def models(self) -> list[ModelCard]:
        return []

    async def abort(self, *request_ids: str) -> int | None:
        return 0

    async def close(self) -> None:
        """Nothing is open."""


def _first_difference(recorded: list[int], prompt: list[int]) -> int:
    """Return the first position at which two prompts differ."""
    pairs = zip(recorded, prompt, strict=False)
    shorter = min(len(recorded), len(prompt))
    return next((at for at, (before, now) in enumerate(pairs) if before != now), shorter)
