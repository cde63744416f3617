"""The protocol of environments: a source of tasks, and a reward for each rollout."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from lockstep.client.chat import TURN_STRIDE, Chat
from lockstep.client.policy import Policy
from lockstep.ledger.breaks import TRAINER_BREAKS
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest, LockstepError, RolloutFailed
from lockstep.train.envs.agent_session import AgentSession, AgentSessions
from lockstep.train.failure import from_env

Split = Literal["train", "eval"]
CHAT_STRIDE = TURN_STRIDE << 20
"""Distance between the seeds of a rollout's conversations, larger than any number of turns."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: the messages that open it, its tools, and facts for computing the reward."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a rollout: `value` is learnt from, `solved` is counted in reports.

    A rollout with a `failure` is not learnt from and is left out of its group.
    """

    value: float
    solved: bool
    detail: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None


class RolloutContext:
    """The policy within one rollout: opens conversations and sessions.

        turn = await context.chat(task).send("What is 2 + 2?")

    Every conversation and session becomes a sample that is learnt from.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        sessions: AgentSessions | None = None,
        train_aborted: bool = False,
        **options: Any,
    ) -> None:
        """`options` apply to every turn: seed, temperature, max_tokens and so on. `sessions` opens
        sessions for agents; None where no control plane can mint them."""
        self.policy = policy
        self.chats: list[Chat] = []
        self.options = options
        self._sessions = sessions
        self._train_aborted = train_aborted
        self._agent_samples: list[Sample] = []

    def chat(self, task: Task | None = None, **options: Any) -> Chat:
        """Open a conversation to learn from, by default with the tools of the task."""
        merged = {**self.options, **options}
        if merged.get("seed") is not None:
            # Turn i uses seed + i: a second conversation must not repeat the draws of the first.
            merged["seed"] += CHAT_STRIDE * len(self.chats)
        tools = list(task.tools) if task is not None and task.tools else None
        chat = self.policy.chat(**{"tools": tools, "breaks": TRAINER_BREAKS, **merged})
        self.chats.append(chat)
        return chat

    async def open_session(self, **budget: Any) -> AgentSession:
        """Open a session for a program that sends its own requests; see AgentSessions.open.

        Its turns are sampled with the program's options, not with this rollout's. Raises BadRequest
        without a control plane.
        """
        if self._sessions is None:
            raise BadRequest(
                "this environment needs gateway sessions, but the run has no control plane that "
                "opens them: use `lockstep serve` or `lockstep gateway`, and set serve.admin_url",
                param="serve.admin_url",
            )
        return await self._sessions.open(**budget)

    async def end_session(
        self,
        session: AgentSession,
        reward: float,
        *,
        kinds: Sequence[str] | None = None,
        weights: str | None = None,
    ) -> None:
        """Finish a session with its reward and collect the samples of its branches."""
        await session.fleet.finish_session(session.id, reward)
        self._agent_samples += await session.fleet.samples(
            session.id, train_aborted=self._train_aborted, kinds=kinds, weights=weights
        )

    async def drop_session(self, session: AgentSession) -> None:
        """End a session whose samples are not needed, ignoring errors of the control plane."""
        with suppress(LockstepError):
            await session.fleet.end_session(session.id)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Add samples of conversations that were not opened through this context."""
        self._agent_samples += samples

    def samples(self, *, train_aborted: bool) -> list[Sample]:
        """Return one sample for every branch with sampled tokens of every conversation."""
        return [
            *(
                sample
                for chat in self.chats
                for sample in chat.samples(train_aborted=train_aborted)
            ),
            *self._agent_samples,
        ]

    @property
    def breaks(self) -> int:
        return sum(sum(chat.break_counts.values()) for chat in self.chats) + sum(
            len(sample.breaks) for sample in self._agent_samples
        )


@runtime_checkable
class Environment(Protocol):
    """An environment: a source of tasks, and rollouts with a reward.

        class Agree:
            def tasks(self, split, seed):
                while True:
                    yield Task(({"role": "user", "content": "Say yes."},))

            async def rollout(self, task, context):
                turn = await context.chat(task).send(list(task.messages))
                return Reward(float("yes" in turn.text), turn.text == "yes")

    [env.options] of the configuration are the arguments of its constructor. An environment whose
    tasks and rewards depend on nothing but seed and responses says so with the class attribute
    `deterministic = True`: `lockstep replay` then computes them again. Rewards of any other
    (tools, clocks, judges) are replayed from the record.
    """

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield tasks without end, always the same for a seed. No "eval" task is a "train" task."""
        ...

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        """Run one rollout and return its reward. Transient errors of the policy are retried."""
        ...


def load_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Create the environment `name` with `options`. Raises BadRequest that says what is wrong.

    A name is reverse, calc, guess, harness, verifiers:NAME, or an import path package.module:Class.
    """
    from lockstep.train.envs.bundled import BUNDLED

    keywords = dict(options or {})
    if name.startswith("verifiers:"):
        return _load_verifiers(name.partition(":")[2], keywords)
    if name == "harness":
        from lockstep.train.envs.harness import Harness

        return Harness(**keywords)
    factory = BUNDLED.get(name) or _import(name, sorted(BUNDLED))
    with from_env(name, "in its constructor"):
        try:
            environment = factory(**keywords)
        except TypeError as error:
            raise BadRequest(
                f"env {name!r} does not accept the options {keywords}: {error}", param="env.options"
            ) from None
    if not isinstance(environment, Environment):
        raise BadRequest(
            f"env {name!r} is a {type(environment).__name__} without the methods tasks and rollout",
            param="env.name",
        )
    return environment


def _load_verifiers(name: str, options: dict[str, Any]) -> Environment:
    try:
        # Imported by name: integrations are a layer above this package.
        integration = importlib.import_module("lockstep.integrations.verifiers")
    except ImportError as error:
        raise BadRequest(
            f"env 'verifiers:{name}' needs the verifiers package ({error}): pip install "
            "'lockstep-rl[verifiers]'",
            param="env.name",
        ) from None
    environment: Environment = integration.VerifiersEnvironment(name, **options)
    return environment


def _import(name: str, bundled: Sequence[str]) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise BadRequest(
            f"env {name!r} does not exist: expected one of {', '.join(bundled)}, harness, "
            "verifiers:NAME, or an import path package.module:Class",
            param="env.name",
        )
    with from_env(name, "on import"):
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            raise BadRequest(f"env {name!r}: {error}", param="env.name") from None
    try:
        return getattr(imported, attribute)
    except AttributeError:
        raise BadRequest(f"env {name!r}: {module} has no {attribute!r}", param="env.name") from None


def check_reward(reward: object) -> Reward:
    """Return the reward of `rollout`. Raises RolloutFailed unless it is a finite Reward."""
    if not isinstance(reward, Reward):
        raise RolloutFailed(
            f"rollout returned {str(reward)[:80]!r}, a {type(reward).__name__}: expected "
            "lockstep.train.Reward(value, solved)",
            param="env.name",
        )
    if not math.isfinite(reward.value):
        raise RolloutFailed(
            f"rollout returned a reward of {reward.value}: expected a finite number",
            param="env.name",
        )
    return reward
