"""The protocol of environments: tasks to play, and a reward for how a policy played one."""

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
"""How far the seeds of a rollout's conversations are apart: further than any has turns."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: the messages that open it, its tools, and what its judge must know."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """How well it went: `value` is what is learnt from, `solved` what people count.

    `failure` says why the rollout is not one to learn from: it is left out of its group.
    """

    value: float
    solved: bool
    detail: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None


class Player:
    """The policy of one rollout: opens conversations and sessions, and keeps their samples."""

    def __init__(
        self,
        policy: Policy,
        *,
        sessions: AgentSessions | None = None,
        train_aborted: bool = False,
        **options: Any,
    ) -> None:
        """`options` hold for every turn: seed, temperature, max_tokens and the like. `sessions` are
        where agents play, None where no control plane can mint them."""
        self.policy = policy
        self.chats: list[Chat] = []
        self.options = options
        self._sessions = sessions
        self._train_aborted = train_aborted
        self._agent_samples: list[Sample] = []

    def chat(self, task: Task | None = None, **options: Any) -> Chat:
        """A new conversation that will be learnt from, by default with the tools of the task."""
        merged = {**self.options, **options}
        if merged.get("seed") is not None:
            # Turns go up from the seed: a second conversation must not repeat the first's draws.
            merged["seed"] += CHAT_STRIDE * len(self.chats)
        tools = list(task.tools) if task is not None and task.tools else None
        chat = self.policy.chat(**{"tools": tools, "breaks": TRAINER_BREAKS, **merged})
        self.chats.append(chat)
        return chat

    async def open_session(self, **budget: Any) -> AgentSession:
        """A session for a program that samples by itself; see AgentSessions.open.

        Its turns are sampled as the program asks for, not with this rollout's options. Raises
        BadRequest where there is no control plane for it.
        """
        if self._sessions is None:
            raise BadRequest(
                "agents play in sessions of a gateway, and this run has no control plane that "
                "begins them: use `lockstep serve` or `lockstep gateway`, and serve.admin_url",
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
        """Finishes a session with its reward and takes the samples of its branches."""
        await session.fleet.finish_session(session.id, reward)
        self._agent_samples += await session.fleet.samples(
            session.id, train_aborted=self._train_aborted, kinds=kinds, weights=weights
        )

    async def drop_session(self, session: AgentSession) -> None:
        """Forgets a session of which nothing is to be learnt; as well as it can."""
        with suppress(LockstepError):
            await session.fleet.end_session(session.id)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Adds samples of conversations that a program had with the policy by itself."""
        self._agent_samples += samples

    def samples(self, *, train_aborted: bool) -> list[Sample]:
        """One sample for every branch of every conversation in which something was sampled."""
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
    """Two methods. Instances are made with the options of the config's [env.options]."""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Tasks without end, always the same for a seed; no task of "eval" is one of "train"."""
        ...

    async def play(self, task: Task, player: Player) -> Reward:
        """Has the conversation and judges it. Raises what the policy raises: it is retried."""
        ...


def load_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """The environment of that name, made with `options`. Raises BadRequest that says what is wrong.

    A name is one of the bundled ones, "harness", "verifiers:NAME", or an import path
    "package.module:Class".
    """
    from lockstep.train.envs.bundled import BUNDLED

    keywords = dict(options or {})
    if name.startswith("verifiers:"):
        return _of_verifiers(name.partition(":")[2], keywords)
    if name == "harness":
        from lockstep.train.envs.harness import Harness

        return Harness(**keywords)
    made = BUNDLED.get(name) or _imported(name, sorted(BUNDLED))
    with from_env(name, "when it was made"):
        try:
            environment = made(**keywords)
        except TypeError as error:
            raise BadRequest(
                f"env {name!r} does not take {keywords}: {error}", param="env.options"
            ) from None
    if not isinstance(environment, Environment):
        raise BadRequest(
            f"env {name!r} made a {type(environment).__name__} without tasks and play",
            param="env.name",
        )
    return environment


def _of_verifiers(name: str, options: dict[str, Any]) -> Environment:
    try:
        # By its name, as any environment from outside: it stands on this package, not under it.
        integration = importlib.import_module("lockstep.integrations.verifiers")
    except ImportError as error:
        raise BadRequest(
            f"env 'verifiers:{name}' needs the verifiers package ({error}): pip install "
            "'lockstep-rl[verifiers]'",
            param="env.name",
        ) from None
    environment: Environment = integration.VerifiersEnvironment(name, **options)
    return environment


def _imported(name: str, bundled: Sequence[str]) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise BadRequest(
            f"env {name!r} is not known: expected one of {', '.join(bundled)}, harness, "
            "verifiers:NAME, or "
            "an import path like package.module:Class",
            param="env.name",
        )
    with from_env(name, "when it was imported"):
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            raise BadRequest(f"env {name!r}: {error}", param="env.name") from None
    try:
        return getattr(imported, attribute)
    except AttributeError:
        raise BadRequest(f"env {name!r}: {module} has no {attribute!r}", param="env.name") from None


def check_reward(reward: object) -> Reward:
    """What `play` returned, if one can learn from it. Raises RolloutFailed."""
    if not isinstance(reward, Reward):
        raise RolloutFailed(
            f"play returned {str(reward)[:80]!r}, a {type(reward).__name__}: expected "
            "lockstep.train.Reward(value, solved)",
            param="env.name",
        )
    if not math.isfinite(reward.value):
        raise RolloutFailed(
            f"play returned a reward of {reward.value}: expected a finite number", param="env.name"
        )
    return reward
