"""The configuration of a training run: read strictly from TOML into immutable values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.sampling import MAX_LOGPROBS
from lockstep.train.losses.loss_config import LossConfig, LossPlan
from lockstep.train.losses.reference_kl import Estimator
from lockstep.train.ranges import Range

Handling = Literal["drop", "mask", "keep"]
SinkName = Literal["jsonl", "wandb", "tensorboard", "trackio", "mlflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The gateway that serves the policy."""

    url: Annotated[str, "Data URL of the gateway."] = "http://127.0.0.1:8000"
    admin_url: Annotated[str, "Control-plane URL of the gateway."] = "http://127.0.0.1:8001"
    admin_token: Annotated[
        str | None,
        "Token of the control plane. Unset: read from admin_token_file, then LOCKSTEP_ADMIN_TOKEN.",
    ] = None
    admin_token_file: Annotated[str | None, "File that holds the token."] = None
    api_key: Annotated[str | None, "API key for the data URL, if it requires one."] = None
    model: Annotated[str | None, "Served model to train. Unset: the only one."] = None
    tokenizer: Annotated[str | None, "Directory or bundled name. Unset: the model's."] = None
    retry_seconds: Annotated[
        float, Range(least=0), "How long to retry while the fleet is unreachable."
    ] = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """The environment whose tasks are played."""

    name: Annotated[
        str,
        "reverse, calc, guess, harness, verifiers:NAME, or an import path package.module:Class.",
    ] = "reverse"
    options: Annotated[Mapping[str, Any], "Keyword arguments of the environment."] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How rollouts are sampled. A step plays `groups` tasks, each `group_size` times."""

    groups: Annotated[int, Range(least=1), "Tasks per step."] = 16
    group_size: Annotated[
        int, Range(least=1), "Rollouts per task. Rewards are compared within a group."
    ] = 8
    max_tokens: Annotated[int, Range(least=1), "Maximum number of tokens per turn."] = 48
    temperature: Annotated[float, Range(above=0), "Sampling temperature."] = 1.0
    top_p: Annotated[
        float, Range(above=0, most=1), "Draw from the likeliest tokens that add up to this much."
    ] = 1.0
    top_k: Annotated[int, Range(least=0), "Draw from this many likeliest tokens. 0: all."] = 0
    min_p: Annotated[
        float, Range(least=0, most=1), "Draw from tokens with this share of the likeliest's."
    ] = 0.0
    logprobs: Annotated[
        LogprobMode, "processed; raw requires temperature 1, and no top_p, top_k or min_p."
    ] = "processed"
    concurrency: Annotated[int, Range(least=1), "Maximum number of concurrent rollouts."] = 128
    max_rounds: Annotated[
        int,
        Range(least=1),
        "How many times `groups` tasks a step may play, where groups with equal rewards are "
        "replaced (loss.resample).",
    ] = 4
    experts: Annotated[
        bool | None,
        "Request the routed experts of every token. Unset: if the learner replays them.",
    ] = None
    samples_shown: Annotated[
        int, Range(least=0), "Conversations per step that are stored for the report."
    ] = 2

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """The model that is trained, and its optimizer.

    `exact` true requires that trainer and workers compute the same bits: a run that cannot does not
    start. false trains in close mode. Unset, the run is exact where possible.
    """

    lr: Annotated[float, Range(above=0), "Learning rate of AdamW."] = 1e-4
    warmup_steps: Annotated[
        int, Range(least=0), "Steps over which the learning rate rises linearly from 0."
    ] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], "How the rate falls after the warmup."
    ] = "constant"
    decay_steps: Annotated[
        int | None, Range(least=1), "Step at which the rate reaches lr_min. Unset: loop.steps."
    ] = None
    lr_min: Annotated[float, Range(least=0), "The rate that the schedule ends with."] = 0.0
    betas: Annotated[tuple[float, float], Range(least=0, below=1), "Betas of AdamW."] = (0.9, 0.95)
    weight_decay: Annotated[float, Range(least=0), "Weight decay of AdamW."] = 0.0
    max_grad_norm: Annotated[float, Range(above=0), "Gradients are clipped to this norm."] = 1.0
    pass_tokens: Annotated[
        int,
        Range(least=1),
        "Maximum number of tokens per forward pass, whose gradients add up to those of the step. "
        "A longer sample gets its own pass.",
    ] = 8192
    device: Annotated[str, "cpu or cuda."] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        "Type of the trained weights. float16 has float32 copies for the optimizer.",
    ] = "float32"
    threads: Annotated[int, Range(least=1), "Number of torch threads."] = 1
    exact: Annotated[
        bool | None, "Require the engine's bits (true) or not (false). Unset: where possible."
    ] = None
    support: Annotated[
        Literal["recorded", "reselected"],
        "Tokens drawn with top_p, top_k or min_p: require the recorded sets, or select tokens "
        "again under the trained weights where there are none, which biases the ratios.",
    ] = "recorded"
    replay_experts: Annotated[bool, "Route each token to the experts that the engine chose."] = True
    probe_tolerance: Annotated[
        float | None,
        Range(least=0),
        "Tolerance of the probe that proves an update. Unset: measured.",
    ] = None
    lora_rank: Annotated[int, Range(least=0), "Rank of the LoRA adapter. 0 trains all weights."] = 0
    lora_alpha: Annotated[int, Range(least=1), "Alpha of the adapter."] = 32
    lora_targets: Annotated[tuple[str, ...], "Modules that get an adapter."] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    lora_name: Annotated[str, "Name under which the adapter is served."] = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The training loop.

    `sync` waits for each update and is deterministic. `async` samples rollouts while it trains. A
    step whose samples were all dropped is skipped; the run ends after more than `max_skipped`
    skipped steps in a row.
    """

    mode: Annotated[Literal["sync", "async"], "Wait for each update, or sample meanwhile."] = "sync"
    steps: Annotated[int, Range(least=1), "Number of training steps."] = 30
    max_off_policy: Annotated[
        int, Range(least=0), "Maximum age of a token in updates. Older tokens are dropped (async)."
    ] = 2
    mixed: Annotated[Handling, "What to do with samples of several weight versions."] = "keep"
    aborted: Annotated[Handling, "What to do with samples that have an aborted turn."] = "mask"
    update_mode: Annotated[
        Literal["keep", "wait", "abort"], "What an update does to running requests."
    ] = "keep"
    pin_version: Annotated[
        bool | None,
        "In sync mode, require the newest version for rollouts. Unset: if all workers support it, "
        "as Lockstep's do.",
    ] = None
    keep_checkpoints: Annotated[int, Range(least=1), "Number of checkpoints to keep on disk."] = 3
    max_skipped: Annotated[int, Range(least=0), "Maximum number of skipped steps in a row."] = 3
    explain: Annotated[
        Literal["off", "report", "stop"],
        "Explain the first mismatch above three times the healthy band, then go on or stop.",
    ] = "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """How the weights of each step reach the workers. The run directory has full checkpoints."""

    store: Annotated[
        str | None,
        "Prefix of an object store, such as s3://bucket/run, from which gateway and workers fetch "
        "them. Unset: they read the run directory.",
    ] = None
    deltas: Annotated[
        bool, "Store only what changed since the last step, where that is less than half."
    ] = True
    anchor_every: Annotated[
        int, Range(least=1), "Store a full checkpoint at least once in so many steps."
    ] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts, before and after training."""

    prompts: Annotated[
        int, Range(least=0), "Number of held-out prompts. 0 disables evaluation."
    ] = 64
    every: Annotated[
        int, Range(least=0), "Also evaluate every so many steps. 0: only before and after."
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The model that distill, forward_kl, reverse_kl and jsd learn from.

    A served teacher has a `url`; the three divergences take its `top_k` likeliest tokens at each
    sampled token. With a `path`, the trainer loads the teacher, and they compare the whole
    vocabulary.
    """

    url: Annotated[str, "Data URL of the teacher."] = ""
    path: Annotated[
        str | None, "Directory or bundled name of a teacher that the trainer loads."
    ] = None
    top_k: Annotated[
        int,
        Range(least=1, most=MAX_LOGPROBS),
        "Likeliest tokens that a served teacher returns. vLLM has 20 by default.",
    ] = 20
    model: Annotated[str | None, "Model of the teacher. Unset: the only one."] = None
    api_key: Annotated[str | None, "API key of the teacher, if it requires one."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """A penalty on the divergence from reference weights. Off while `weight` is 0."""

    weight: Annotated[float, Range(least=0), "Factor of the penalty in the loss."] = 0.0
    kind: Annotated[
        Literal["frozen", "ema"],
        "The weights that the run started from, or an exponential moving average of its weights.",
    ] = "frozen"
    estimator: Annotated[
        Estimator,
        "Penalty of a token, with x = log(policy / reference): k1, a policy gradient with reward "
        "-x; k2, x^2 / 2; k3, exp(-x) + x - 1.",
    ] = "k3"
    decay: Annotated[
        float | None,
        Range(least=0, below=1),
        "Share of the average that remains in each step (ema). Unset: 0.99.",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The configuration of one run.

        config = TrainConfig.read("run.toml")
        result = await Trainer(config).run()

    A field that does not exist, or has a wrong type or value, raises BadRequest with its name.
    """

    model: Annotated[str, "Weights that training starts from: bundled name or directory."] = "tiny"
    run_dir: Annotated[str, "Directory for checkpoints, metrics and samples."] = "run"
    seed: Annotated[int, Range(least=0, below=2**63), "Seed of tasks, sampling and learning."] = 0
    sinks: Annotated[
        tuple[SinkName, ...],
        "Trackers that also receive the metrics. jsonl, in the run directory, is always written.",
    ] = ("jsonl",)
    serve: ServeConfig = field(default_factory=ServeConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                value: Any = self
                for part in name.split("."):
                    value = getattr(value, part)
                raise BadRequest(f"{name} is {value!r}: expected {expected}", param=name)

        _check_ranges(self, "")
        require(re.fullmatch(r"cpu|cuda(:\d+)?", self.learner.device) is not None, "learner.device",
                "cpu, cuda or cuda:N")  # fmt: skip
        require(self.publish.store is None or not self.learner.lora_rank, "publish.store",
                "none with learner.lora_rank: workers load adapters from directories")  # fmt: skip
        learns_from, teacher = self.loss_plan.loss.learns_from, self.teacher
        from_teacher = learns_from != "rewards"
        require(from_teacher or self.rollout.group_size >= 2, "rollout.group_size",
                "2 or more, as rewards are compared within a group")  # fmt: skip
        require(self.rollout.temperature == 1.0 or self.rollout.logprobs == "processed",
                "rollout.logprobs", "'processed' when rollout.temperature is not 1: raw logprobs "
                "are not those of the distribution that was sampled from")  # fmt: skip
        require(not self.rollout.truncates or self.rollout.logprobs == "processed",
                "rollout.logprobs", "'processed' with rollout.top_p, top_k or min_p: raw logprobs "
                "are not those of the sets that tokens were drawn from")  # fmt: skip
        whole = learns_from == "distributions"
        require(whole or teacher.path is None, "teacher.path",
                f"nothing, as loss.kind is {self.loss.kind!r}, which has a url")  # fmt: skip
        require(not from_teacher or bool(teacher.url) or teacher.path is not None, "teacher.url",
                f"the URL of a teacher, as loss.kind is {self.loss.kind!r}")  # fmt: skip
        require(not teacher.url or teacher.path is None, "teacher.url",
                f"nothing, as teacher.path is {teacher.path!r}")  # fmt: skip
        require(not whole or not self.rollout.truncates, "loss.kind",
                "another, as rollout.top_p, top_k or min_p truncate what it compares")  # fmt: skip
        learner, reference = self.learner, self.reference
        decays = learner.schedule != "constant"
        require(decays or learner.decay_steps is None, "learner.decay_steps",
                "nothing, as learner.schedule is 'constant'")  # fmt: skip
        require(decays or not learner.lr_min, "learner.lr_min",
                "0, as learner.schedule is 'constant'")  # fmt: skip
        require(learner.lr_min <= learner.lr, "learner.lr_min",
                f"at most learner.lr, which is {learner.lr:g}")  # fmt: skip
        end = learner.decay_steps or self.loop.steps
        require(not decays or learner.warmup_steps < end, "learner.warmup_steps",
                f"less than {end}, the step at which learner.schedule {learner.schedule!r} reaches "
                "its end")  # fmt: skip
        require(reference.kind == "frozen" or not learner.lora_rank, "reference.kind",
                f"'frozen', as learner.lora_rank is {learner.lora_rank}: the reference of an "
                "adapter is the model without it")  # fmt: skip
        require(reference.kind == "ema" or reference.decay is None, "reference.decay",
                "nothing, as reference.kind is 'frozen'")  # fmt: skip

    @property
    def loss_plan(self) -> LossPlan:
        """The loss with all of its settings. Raises BadRequest as `LossConfig.plan` does."""
        return self.loss.plan(self.rollout.max_tokens)

    @classmethod
    def read(cls, path: str | Path) -> TrainConfig:
        """Read a run from a TOML file. Raises BadRequest that names the wrong field."""
        try:
            raw = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise BadRequest(f"{path} cannot be read: {error.strerror}", param="config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"{path} is not TOML: {error}", param="config") from None
        return cls.of(raw)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> TrainConfig:
        """Return the run that nested mappings describe. Raises BadRequest that names the field."""
        _check_names(cls, raw, "")
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise _explain(str(error), raw) from None

    def with_changes(self, changes: Mapping[str, Any]) -> TrainConfig:
        """Return the run with other values of fields, by name ("learner.lr"). Raises BadRequest."""
        raw = asdict(self)
        for name, value in changes.items():
            section, _, key = name.rpartition(".")
            fields = raw.get(section) if section else raw
            if not isinstance(fields, dict) or key not in fields:
                raise BadRequest(f"{name} is not a field of the configuration", param=name)
            fields[key] = value
        return type(self).of(raw)

    def differences(self, started: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the fields that decide what a run learns and differ from those it started with.

        `started` is the `to_dict` of the run. The values are (started with, now).
        """
        before, now = _flat(started), _flat(json.loads(json.dumps(self.to_dict())))
        free: tuple[str, ...] = FREE_TO_CHANGE
        if self.learner.schedule != "constant" and self.learner.decay_steps is None:
            free = tuple(name for name in free if name != "loop.steps")  # they decide the rates
        if self.loop.mode == "sync":
            free = (*free, "loop.max_off_policy")
        return {
            name: (before[name], value)
            for name, value in now.items()
            if name in before and before[name] != value and not name.startswith(free)
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the run as `of` takes it, with secrets replaced by ***."""
        plain = asdict(self)
        secrets = (("serve", "admin_token"), ("serve", "api_key"), ("teacher", "api_key"))
        for section, key in secrets:
            plain[section][key] = None if plain[section][key] is None else "***"
        return plain


FREE_TO_CHANGE = (
    "run_dir", "sinks", "serve.", "publish.", "eval.", "teacher.url", "teacher.api_key",
    "loop.steps", "loop.keep_checkpoints", "loop.max_skipped", "rollout.concurrency",
    "rollout.samples_shown",
    "learner.device", "learner.threads", "learner.exact", "learner.probe_tolerance",
    "rollout.experts",
)  # fmt: skip
"""Fields that a resumed run may change without notice: they do not decide what it learns. Experts
that the learner replays are required, so that `rollout.experts` is no choice of the run."""
REPLACED = {
    "loss.mask": 'set loss.kind to "dppo" or "ipo"',
    "loss.mask_low": "set loss.options.mask_low",
    "loss.mask_high": "set loss.options.mask_high",
    "loss.kl": "set loss.options.kl",
    "loss.normalize_std": 'set loss.baseline to "group_std"',
    "learner.micro_batch": "set learner.pass_tokens",
}
"""Fields of earlier versions, and what replaces each."""
TYPE_NAMES = {"object": "a table", "array": "a list", "bool": "true or false"}
PROBLEM = re.compile(r"(?:Expected `([^`]*)`(?: of length (\d+))?)?.*? - at `\$\.(.*)`$")


def _check_ranges(section: Any, path: str) -> None:
    """Raise BadRequest for the first number that is outside the range of its field."""
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        value, place = getattr(section, name), f"{path}{name}"
        if is_dataclass(value):
            _check_ranges(value, f"{place}.")
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            for at, item in enumerate(value):
                _check_ranges(item, f"{place}[{at}].")
        for allowed in getattr(hint, "__metadata__", ()):
            if isinstance(allowed, Range) and value is not None and value not in allowed:
                raise BadRequest(f"{place} is {value!r}: expected {allowed}", param=place)


def _flat(raw: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with names such as learner.lr."""
    flat: dict[str, Any] = {}
    for name, value in raw.items():
        nested = isinstance(value, Mapping) and name != "options"
        flat |= _flat(value, f"{path}{name}.") if nested else {f"{path}{name}": value}
    return flat


def _check_names(kind: Any, raw: Mapping[str, Any], path: str) -> None:
    """Raise BadRequest for a field that does not exist: msgspec ignores those of a dataclass."""
    hints = get_type_hints(kind)
    for name, value in raw.items():
        field = f"{path}{name}"
        if name not in hints:
            expected = f"expected one of {', '.join(hints)}"
            if field in REPLACED:
                expected = f"it was replaced: {REPLACED[field]}"
            raise BadRequest(f"{field} is not a known field: {expected}", param=field)
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            _check_names(hints[name], value, f"{field}.")
        item_kind = next(iter(get_args(hints[name])), None)
        if is_dataclass(item_kind) and isinstance(value, list | tuple):
            for at, item in enumerate(value):
                if isinstance(item, Mapping):
                    _check_names(item_kind, item, f"{field}[{at}].")


def _explain(message: str, raw: Mapping[str, Any]) -> BadRequest:
    """Return the error for a msgspec validation message, with the field, its value and its type."""
    match = PROBLEM.fullmatch(message)
    if match is None:
        return BadRequest(f"the configuration is wrong: {message}", param="config")
    expected, length, field = match.groups()
    kind: Any = TrainConfig
    value: Any = raw
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        if index:
            kind, value = get_args(kind)[0], value[int(index)]
        else:
            kind, value = get_type_hints(kind).get(name), value[name]
    if get_origin(kind) is Literal:
        wanted = f"one of {', '.join(map(repr, get_args(kind)))}"
    else:
        name = (expected or message).removesuffix(" | null")
        wanted = TYPE_NAMES.get(name, name) + (f" of {length}" if length else "")
    return BadRequest(f"{field} is {value!r}: expected {wanted}", param=field)
