"""Explains the first mismatch of a run that is larger than healthy."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from lockstep.checkpoint.files import write_whole
from lockstep.explain.band import FLOORS
from lockstep.explain.case import Case, select
from lockstep.explain.explainer import Explainer, healthy_band
from lockstep.explain.explanation import Explanation
from lockstep.explain.run import most_tokens
from lockstep.explain.scorer import Scorer
from lockstep.models import model_directory
from lockstep.tokens.errors import Conflict, LockstepError
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import Clock, TrainBatch
from lockstep.train.learning.exactness import Exactness
from lockstep.train.learning.learner import StepOutcome
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.step_metrics import StepMetrics

log = logging.getLogger(__name__)
FACTOR = 3.0
"""A mismatch is explained when single tokens differ by more than this many times the band."""
TOKENS, PASSES, OTHERS = 1024, 600, 2
FILE = "explanation.json"


class MismatchExplainer:
    """Names the cause of a run's mismatch once, in the run directory, its events and the log.

    Called in the learner's thread. It holds a second copy of the model while it computes.
    """

    def __init__(self, config: TrainConfig, directory: RunDirectory, exactness: Exactness) -> None:
        self._config = config
        self._directory = directory
        self._exactness = exactness
        self._done = config.loop.explain == "off"

    def is_due(self, draft: StepMetrics) -> bool:
        """Return whether the mismatch of a step may be larger than healthy.

        Tokens of older weights differ by what was learnt since, so that only steps without them
        count.
        """
        least = 0.0 if self._exactness.is_exact else FLOORS[self._config.learner.dtype][1]
        return not self._done and draft.off_policy_max == 0 and draft.more["mismatch_max"] > least

    def explain(
        self, draft: StepMetrics, batch: TrainBatch, outcome: StepOutcome, clock: Clock
    ) -> None:
        """Explain the mismatch of a step and record the explanation, unless it is healthy.

        Raises Conflict if the run shall stop (loop.explain).
        """
        step = draft.step
        try:
            explanation = self._explanation(draft, batch, outcome, clock)
        except LockstepError as error:
            self._done = True
            self._directory.event(
                "explanation", step=step, outcome="failed", cause=None, sentence=error.message
            )
            return
        if explanation is None:
            return
        self._done = True
        lines = list(explanation.lines())
        contents = {"step": step, "lines": lines, **explanation.to_json()}
        write_whole(self._directory.path / FILE, json.dumps(contents, indent=1).encode())
        self._directory.event(
            "explanation", step=step, outcome=explanation.outcome, cause=explanation.cause,
            sentence=explanation.sentence,
        )  # fmt: skip
        log.warning("step %d: mismatch: %s", step, explanation.sentence)
        if self._config.loop.explain == "stop" and explanation.outcome != "healthy":
            raise Conflict(
                f"loop.explain is stop, and the trainer's and the engines' logprobs of step {step} "
                f"differ: {explanation.sentence} ({self._directory.path / FILE})",
                param="loop.explain",
            )

    def _explanation(
        self, draft: StepMetrics, batch: TrainBatch, outcome: StepOutcome, clock: Clock
    ) -> Explanation | None:
        """Return the explanation, or None for a mismatch within the threshold."""
        case = self._case(draft.step, batch, outcome, clock)
        scorer = Scorer(case, device=self._config.learner.device, budget=PASSES)
        band = healthy_band(case, scorer)
        if not self._exactness.is_exact and draft.more["mismatch_max"] <= FACTOR * band.high:
            return None
        return Explainer(case, scorer).run()

    def _case(self, step: int, batch: TrainBatch, outcome: StepOutcome, clock: Clock) -> Case:
        config, model = self._config, model_directory(self._config.model)
        vocab = int(json.loads((model / "config.json").read_bytes())["vocab_size"])
        samples = [item.sample for item in batch.items]
        chosen, indices = select(samples, most_tokens(TOKENS, vocab), vocab)
        served = self._directory.checkpoint(step - 1)
        earlier = [
            (label, self._directory.checkpoint(at))
            for label, at in clock.steps.items()
            if 0 < at < step - 1 and self._directory.checkpoint(at).is_dir()
        ][-OTHERS:]
        workers = self._exactness.workers
        dtype = config.learner.dtype if workers is None else workers.dtype
        numbers = [
            number
            for at in indices
            for number, sampled in zip(
                outcome.logprobs[at][1:], samples[at].sampled_mask[1:], strict=True
            )
            if sampled
        ]
        if config.learner.lora_rank:
            adapters: tuple[Path, ...] = tuple(path for _, path in earlier)
            adapter = served if served.is_dir() else None
            return Case(
                samples=chosen, checkpoint=model, adapter=adapter, other_adapters=adapters,
                engine_dtype=dtype, trainer_dtype=config.learner.dtype, trainer=numbers,
            )  # fmt: skip
        others = earlier if step == 1 or not served.is_dir() else [*earlier, ("", model)]
        return Case(
            samples=chosen, checkpoint=served if served.is_dir() else model, others=tuple(others),
            engine_dtype=dtype, trainer_dtype=config.learner.dtype, trainer=numbers,
            tokenizer=model,
        )  # fmt: skip
