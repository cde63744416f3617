"""What a run is: read from TOML, strictly, into values that do not change."""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest

Handling = Literal["drop", "mask", "keep"]
SinkName = Literal["jsonl", "wandb", "tensorboard", "trackio", "mlflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the policy is served. The token of the control plane is the value, or in the file."""

    url: Annotated[str, "The gateway's data URL."] = "http://127.0.0.1:8000"
    admin_url: Annotated[str, "The gateway's control plane."] = "http://127.0.0.1:8001"
    admin_token: Annotated[str | None, "Its token; else the file's, else LOCKSTEP_ADMIN_TOKEN."] = (
        None
    )
    admin_token_file: Annotated[str | None, "The file that holds it."] = None
    api_key: Annotated[str | None, "The key of the data URL, where it has keys."] = None
    model: Annotated[str | None, "Which served model; None: the only one."] = None
    tokenizer: Annotated[str | None, "Directory or bundled name; None: that of the model."] = None
    retry_seconds: Annotated[float, "How long an unreachable fleet is waited for."] = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """`name` is reverse, calc, guess, harness, verifiers:NAME, or an import path
    "package.module:Class"."""

    name: Annotated[str, "Which environment."] = "reverse"
    options: Annotated[Mapping[str, Any], "Handed to it as keyword arguments."] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """A step plays `groups` tasks, each `group_size` times."""

    groups: Annotated[int, "Tasks per step."] = 16
    group_size: Annotated[int, "Rollouts per task, compared with each other."] = 8
    max_tokens: Annotated[int, "Most tokens of one turn."] = 48
    temperature: Annotated[float, "Of sampling."] = 1.0
    logprobs: Annotated[LogprobMode, "processed; raw only at temperature 1."] = "processed"
    concurrency: Annotated[int, "Most rollouts at once."] = 128
    experts: Annotated[bool, "Ask for the routed experts of every token."] = False
    samples_shown: Annotated[int, "Conversations per step that the report keeps."] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """`kind` grpo learns from rewards, distill from a teacher.

    `mask` dppo leaves out tokens whose probability moved by more than `mask_low` or `mask_high` in
    the direction the advantage pushes; ipo in any direction. `kl` weighs the squared log ratio.
    """

    kind: Annotated[Literal["grpo", "distill"], "Learn from rewards or from a teacher."] = "grpo"
    normalize_std: Annotated[bool, "Divide advantages by their group's deviation."] = False
    mask: Annotated[Literal["dppo", "ipo", "none"], "Which tokens are left out."] = "dppo"
    mask_low: Annotated[float, "How far a probability may fall."] = 0.2
    mask_high: Annotated[float, "How far it may rise."] = 0.2
    kl: Annotated[float, "Weight of the squared log ratio."] = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """`lora_rank` 0 trains all weights. `exact` None: where trainer and workers compute the same
    bits, else close; true demands it, and a run that cannot have it does not start.

    `replay_experts` sends every token to the experts that the engine chose for it.
    """

    lr: Annotated[float, "Learning rate of AdamW."] = 1e-4
    warmup_steps: Annotated[int, "Steps in which it rises from 0."] = 0
    betas: Annotated[tuple[float, float], "Of AdamW."] = (0.9, 0.95)
    weight_decay: Annotated[float, "Of AdamW."] = 0.0
    max_grad_norm: Annotated[float, "Gradients are clipped to it."] = 1.0
    micro_batch: Annotated[int, "Samples per forward pass; more while they have few tokens."] = 32
    device: Annotated[str, "cpu or cuda."] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16"], "Of the trained weights."] = "float32"
    threads: Annotated[int, "Torch threads."] = 1
    exact: Annotated[bool | None, "Demand the engine's bits, or not; None: where possible."] = None
    replay_experts: Annotated[bool, "Send tokens to the engine's experts."] = True
    probe_tolerance: Annotated[float | None, "Of the update's proof; None: measured."] = None
    lora_rank: Annotated[int, "0 trains all weights."] = 0
    lora_alpha: Annotated[int, "Of the adapter."] = 32
    lora_targets: Annotated[tuple[str, ...], "Modules with an adapter."] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    lora_name: Annotated[str, "The name it is served under."] = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """`sync` waits for each update and is deterministic; `async` plays on while it trains.

    Tokens older than `max_off_policy` updates are not learnt from. `mixed` and `aborted` say what
    happens to samples of several versions, and to those with a turn that was cut off. A step whose
    samples were all dropped is skipped; more than `max_skipped` of them in a row end the run.
    """

    mode: Annotated[Literal["sync", "async"], "Wait for each update, or play on."] = "sync"
    steps: Annotated[int, "Training steps."] = 30
    max_off_policy: Annotated[int, "Updates a token may be behind."] = 4
    mixed: Annotated[Handling, "Samples of several versions."] = "keep"
    aborted: Annotated[Handling, "Samples with a turn that was cut off."] = "mask"
    update_mode: Annotated[Literal["keep", "wait", "abort"], "How an update pauses."] = "keep"
    pin_version: Annotated[bool, "In sync mode, demand the newest version."] = True
    keep_checkpoints: Annotated[int, "Checkpoints that stay on disk."] = 3
    max_skipped: Annotated[int, "Empty steps in a row before it ends."] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out prompts, played before and after, and every so many steps when `every` is not 0."""

    prompts: Annotated[int, "How many."] = 64
    every: Annotated[int, "Steps between evaluations; 0: only before and after."] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The endpoint whose logprobs a distillation learns from."""

    url: Annotated[str, "Its data URL."] = ""
    model: Annotated[str | None, "Which of its models; None: the only one."] = None
    api_key: Annotated[str | None, "Its key, where it has keys."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. `model` is a bundled name or a directory: the weights that training starts from."""

    model: Annotated[str, "Bundled name or directory."] = "tiny"
    run_dir: Annotated[str, "Where checkpoints, metrics and samples go."] = "run"
    seed: Annotated[int, "Of tasks, sampling and learning."] = 0
    sinks: Annotated[
        tuple[SinkName, ...],
        "Trackers that get the metrics too; jsonl, the run's own, always does.",
    ] = ("jsonl",)
    serve: ServeConfig = field(default_factory=ServeConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                value: Any = self
                for part in name.split("."):
                    value = getattr(value, part)
                raise BadRequest(f"{name} is {value!r}: expected {expected}", param=name)

        counts = {"rollout": ("groups", "max_tokens", "concurrency"),
                  "loop": ("steps", "keep_checkpoints"),
                  "learner": ("micro_batch", "threads")}  # fmt: skip
        for section, keys in counts.items():
            for key in keys:
                require(getattr(getattr(self, section), key) >= 1, f"{section}.{key}", "1 or more")
        least = 1 if self.loss.kind == "distill" else 2
        require(self.rollout.group_size >= least, "rollout.group_size",
                "2 or more, as rewards are compared within a group")  # fmt: skip
        require(self.rollout.temperature > 0, "rollout.temperature", "more than 0")
        require(self.rollout.temperature == 1.0 or self.rollout.logprobs == "processed",
                "rollout.logprobs", "'processed' when rollout.temperature is not 1: raw logprobs "
                "are not those of the distribution that was sampled from")  # fmt: skip
        require(self.learner.lr > 0, "learner.lr", "more than 0")
        require(self.loop.max_off_policy >= 0, "loop.max_off_policy", "0 or more")
        require(self.loop.max_skipped >= 0, "loop.max_skipped", "0 or more")
        require(self.loss.kind != "distill" or bool(self.teacher.url), "teacher.url",
                "the URL of a teacher, as loss.kind is 'distill'")  # fmt: skip

    @classmethod
    def read(cls, path: str | Path) -> TrainConfig:
        """The run in a TOML file. Raises BadRequest that names the field."""
        try:
            raw = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise BadRequest(f"{path} cannot be read: {error.strerror}", param="config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"{path} is not TOML: {error}", param="config") from None
        return cls.of(raw)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> TrainConfig:
        """The run that nested mappings describe. Raises BadRequest that names the field."""
        made: TrainConfig = _build(cls, raw, "")
        return made

    def to_dict(self) -> dict[str, Any]:
        """As `of` takes it, without secrets."""
        plain = asdict(self)
        secrets = (("serve", "admin_token"), ("serve", "api_key"), ("teacher", "api_key"))
        for section, key in secrets:
            plain[section][key] = None if plain[section][key] is None else "***"
        return plain


def _build(kind: Any, raw: Any, at: str) -> Any:
    if not isinstance(raw, Mapping):
        raise BadRequest(f"{at} is {raw!r}: expected a table", param=at)
    hints = get_type_hints(kind)
    known = [each.name for each in fields(kind)]
    values = {}
    for name, value in raw.items():
        where = f"{at}.{name}" if at else name
        if name not in known:
            raise BadRequest(f"{where} is not known: expected one of {', '.join(known)}",
                             param=where)  # fmt: skip
        values[name] = _value(hints[name], value, where)
    return kind(**values)


def _value(kind: Any, value: Any, at: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _build(kind, value, at)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, at)
    if origin is Literal:
        if value not in arguments:
            names = ", ".join(map(repr, arguments))
            raise BadRequest(f"{at} is {value!r}: expected one of {names}", param=at)
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or (
            arguments[-1] is not Ellipsis and len(value) != len(arguments)
        ):
            raise BadRequest(f"{at} is {value!r}: expected a list", param=at)
        return tuple(_value(arguments[0], each, f"{at}[{i}]") for i, each in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    plain = Mapping if origin is not None else kind
    if not isinstance(value, plain) or (kind is int and isinstance(value, bool)):
        name = getattr(kind, "__name__", str(kind))
        raise BadRequest(f"{at} is {value!r}: expected {name}", param=at)
    return value
