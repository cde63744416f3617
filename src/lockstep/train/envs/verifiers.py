"""Environments of the `verifiers` package, played through the same conversations as any other.

Takes environments of one conversation each: a dataset of prompts, optional replies in between
(`env_response`), and a rubric that scores the finished conversation.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.tokens.errors import BadRequest
from lockstep.train.envs.environment import Player, Reward, Split, Task


class VerifiersEnvironment:
    """`verifiers.load_environment(name, **options)` as an Environment.

    Raises BadRequest when verifiers is not installed, or has no environment of that name.
    `max_turns` bounds conversations of environments that do not end by themselves, `solved` is the
    reward from which a rollout counts as solved.
    """

    def __init__(self, name: str, *, max_turns: int = 10, solved: float = 1.0, **options: Any):
        try:
            verifiers = importlib.import_module("verifiers")
        except ImportError:
            raise BadRequest(
                f"env 'verifiers:{name}' needs the verifiers package: pip install "
                "'lockstep-rl[verifiers]'",
                param="env.name",
            ) from None
        try:
            self._env = verifiers.load_environment(name, **options)
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise BadRequest(
                f"verifiers cannot load {name!r}: {type(error).__name__}: {error}", param="env.name"
            ) from None
        self._max_turns = max_turns
        self._solved = solved

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        wanted = "get_dataset" if split == "train" else "get_eval_dataset"
        rows = list(getattr(self._env, wanted)())
        if not rows:
            raise BadRequest(f"the {split} dataset of this environment is empty", param="env.name")
        rng = random.Random(f"verifiers {split} {seed}")
        while True:
            for row in rng.sample(rows, len(rows)):
                prompt = row["prompt"]
                if isinstance(prompt, str):
                    prompt = [{"role": "user", "content": prompt}]
                yield Task(tuple(prompt), tuple(row.get("tools") or ()), dict(row))

    async def play(self, task: Task, player: Player) -> Reward:
        chat = player.chat(task)
        state: dict[str, Any] = {**task.facts, "turn": 0}
        turn = await chat.send([dict(message) for message in task.messages])
        opened = len(task.messages)
        for count in range(1, self._max_turns):
            state["turn"] = count
            state["completion"] = chat.messages[opened:]
            reply = await self._reply(chat.messages, state)
            if not reply:
                break
            turn = await chat.send(reply)
        state["completion"] = chat.messages[opened:]
        value, detail = await self._score(task, state)
        return Reward(value, value >= self._solved, {**detail, "said": turn.text})

    async def _reply(self, messages: list[Any], state: dict[str, Any]) -> list[Any]:
        """What the environment says next; nothing when the conversation is over."""
        respond = getattr(self._env, "env_response", None)
        if respond is None:
            return []
        over = getattr(self._env, "is_completed", None)
        if over is not None and await _settled(over(messages, state)):
            return []
        reply = await _settled(respond(messages, state))
        # Older versions return the state beside the messages.
        if isinstance(reply, tuple):
            reply = reply[0]
        return [reply] if isinstance(reply, Mapping) else list(reply or ())

    async def _score(self, task: Task, state: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        rubric = self._env.rubric
        scored = await _settled(
            rubric.score_rollout(
                prompt=list(task.messages),
                completion=state["completion"],
                answer=task.facts.get("answer", ""),
                state=state,
            )
        )
        if isinstance(scored, Mapping):
            return float(scored["reward"]), dict(scored.get("metrics") or {})
        metrics = dict(getattr(scored, "metrics", None) or {})
        return float(getattr(scored, "reward", scored)), metrics


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
