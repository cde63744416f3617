"""Logprobs of the compared tokens under a setting, by the trainer's own forward pass."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.config import ModelConfig
from lockstep.engine.expert_replay import ExpertReplay
from lockstep.engine.forward_pass import TokenRows, packs, shaped_logits
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.text.grammars import Grammars
from lockstep.explain.altered_attention import AlteredAttention
from lockstep.explain.case import Case, Values
from lockstep.explain.model_state import ModelState
from lockstep.explain.rounding import round_values
from lockstep.explain.sequences import ScoredSequence, sequences
from lockstep.explain.setting import Overlay, Setting
from lockstep.export.exported import turns
from lockstep.tokens import Sample, ShapedSpan, Shaping
from lockstep.tokens.errors import Unavailable
from lockstep.tokens.experts import RoutedExperts

KEPT_BYTES = 1 << 30
"""Logits that are kept for further readings."""
PACKED_TOKENS = 4096
"""Tokens of one forward pass over packed samples."""


class Scorer:
    """Computes the logprobs of a case. Results are kept, and stored in `memo` if it is given.

    `budget` limits the forward passes over the case; past it, `values` raises Unavailable. One
    thread may use it.
    """

    def __init__(
        self,
        case: Case,
        *,
        device: str = "cpu",
        budget: int = 2000,
        memo: Path | None = None,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.case = case
        self.device = device
        self.budget = budget
        self.passes = 0
        self._memo = memo
        self._on_pass = on_pass
        self._models: dict[str, tuple[Any, ModelState]] = {}
        self._logits: OrderedDict[Setting, list[tuple[ScoredSequence, Tensor]]] = OrderedDict()
        self._values: dict[Setting, Values] = {}
        self.config = ModelConfig.read(case.checkpoint)

    def over(self, case: Case) -> Scorer:
        """Return a scorer of other samples of the same checkpoint, with the rest of the budget."""
        rest = self.budget - self.passes
        other = Scorer(
            case, device=self.device, budget=rest, memo=self._memo, on_pass=self._on_pass
        )
        other._models = self._models
        return other

    @property
    def is_moe(self) -> bool:
        return bool(self.config.moe_layers)

    @property
    def has_one_rope(self) -> bool:
        """Whether all layers rotate by the same frequencies, which substitutions can replace."""
        rotary = getattr(self._model("float32")[0].model, "rotary_emb", None)
        return hasattr(rotary, "inv_freq")

    def values(self, setting: Setting) -> Values:
        """Return one logprob per compared token; NaN where the setting has no number for it."""
        if setting not in self._values:
            stored = self._load(setting)
            self._values[setting] = self._compute(setting) if stored is None else stored
            if stored is None:
                self._store(setting)
        return self._values[setting]

    def logits(self, setting: Setting) -> list[tuple[ScoredSequence, Tensor]]:
        """Return the raw logits (N, vocab) in float32 of each sequence, before any reading."""
        key = setting.forward
        if key in self._logits:
            self._logits.move_to_end(key)
            return self._logits[key]
        if self.passes >= self.budget:
            raise Unavailable(
                f"the explanation used its {self.budget} forward passes: allow more with "
                "max_passes, or give fewer samples"
            )
        self.passes += 1
        self._on_pass()
        with torch.inference_mode():
            computed = list(self._forward(key))
        self._logits[key] = computed
        size = {
            at: sum(z.nbytes for _, z in logits_kept) for at, logits_kept in self._logits.items()
        }
        while len(self._logits) > 2 and sum(size.values()) > KEPT_BYTES:
            oldest = next(at for at in self._logits if at not in (key, Setting()))
            del self._logits[oldest], size[oldest]
        return computed

    def differing(self, source: Path) -> list[str]:
        """Return the tensors of `source` whose values differ from the checkpoint's."""
        return self._model("float32")[1].differing(source)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._model("float32")[1].views)

    # Forward passes

    def _model(self, compute: str) -> tuple[Any, ModelState]:
        if compute not in self._models:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()
            if compute != "float32" and self.device == "cpu":
                make_bf16_safe()
            model = AutoModelForCausalLM.from_pretrained(
                self.case.checkpoint, dtype=getattr(torch, compute)
            )
            model = model.to(self.device).eval().requires_grad_(False)
            state = ModelState(model)
            if compute == "float32":
                exact.prepare(model, strict=False)
            self._models[compute] = model, state
        return self._models[compute]

    @cached_property
    def _replay(self) -> ExpertReplay:
        return ExpertReplay(self._model("float32")[0])

    @cached_property
    def _grammars(self) -> Grammars:
        directory = self.case.tokenizer or self.case.checkpoint
        return Grammars.of(directory, self.config.vocab_size)

    def _forward(self, setting: Setting) -> Iterator[tuple[ScoredSequence, Tensor]]:
        model, state = self._model(setting.compute)
        pad = model.config.get_text_config().pad_token_id or 0
        scored = sequences(self.case, setting.context, setting.rows, pad)
        if setting.stale is not None:
            yield from self._stale(setting, scored, model, state)
            return
        with state.under(setting), _rounded_head(model, setting):
            if setting.experts != "own":
                for sequence in scored:
                    yield sequence, self._replayed(sequence, model, setting)
            elif setting.altered:
                attention = AlteredAttention(setting.kv, setting.window)
                with attention.on(model):
                    for sequence in scored:
                        yield sequence, self._alone(sequence, model)
            else:
                yield from self._packed(scored, model)

    def _packed(
        self, scored: list[ScoredSequence], model: Any
    ) -> Iterator[tuple[ScoredSequence, Tensor]]:
        batch: list[ScoredSequence] = []
        for at, sequence in enumerate(scored):
            batch.append(sequence)
            tokens = sum(len(item.ids) for item in batch)
            if at + 1 < len(scored) and tokens + len(scored[at + 1].ids) <= PACKED_TOKENS:
                continue
            arranged = TokenRows.arrange(model, [item.ids for item in batch])
            rows = arranged.select([item.rows for item in batch])
            logits = arranged.logits(model, rows).float()
            yield from zip(batch, logits.split([len(item.rows) for item in batch]), strict=True)
            batch = []

    def _alone(self, sequence: ScoredSequence, model: Any) -> Tensor:
        ids = torch.tensor([sequence.ids], device=self.device)
        positions = torch.arange(len(sequence.ids), device=self.device)[None]
        if sequence.restart:
            positions = (positions - sequence.shift).clamp(min=0)
        out = model(input_ids=ids, position_ids=positions, use_cache=False)
        logits: Tensor = out.logits[0, torch.from_numpy(sequence.rows).to(self.device)].float()
        return logits

    def _replayed(self, sequence: ScoredSequence, model: Any, setting: Setting) -> Tensor:
        sample = self.case.samples[sequence.sample]
        if setting.experts == "dummy last":
            sample = _with_dummy_route(sample)
        arranged = TokenRows.arrange(model, [sequence.ids], multiple=1 if packs(model) else None)
        with self._replay.of([sample], arranged.width, torch.device(self.device)):
            return arranged.logits(model, arranged.select([sequence.rows])).float()

    def _stale(
        self, setting: Setting, scored: list[ScoredSequence], model: Any, state: ModelState
    ) -> Iterator[tuple[ScoredSequence, Tensor]]:
        stale = setting.stale
        if stale is None:
            return
        for sequence in scored:
            attention = AlteredAttention(setting.kv, setting.window)
            boundary = _boundary(self.case, sequence.sample, stale.boundary, stale.block)
            with attention.on(model):
                attention.recording = True
                with state.under(setting.with_(overlay=Overlay(stale.source))):
                    self._alone(sequence, model)
                attention.recording = False
                with state.under(setting):
                    fresh = self._alone(sequence, model)
                    attention.boundary = boundary
                    late = self._alone(sequence, model)
            after = torch.from_numpy(sequence.rows >= boundary).to(late.device)
            yield sequence, torch.where(after[:, None], late, fresh)

    # Readings

    def _compute(self, setting: Setting) -> Values:
        values = np.full(self.case.tokens, np.nan)
        with torch.inference_mode():
            for sequence, logits in self.logits(setting):
                if setting.logits is not None:
                    logits = round_values(logits, setting.logits)
                shaped = self._shaped(sequence, logits, setting)
                logprobs = torch.log_softmax(shaped, dim=-1)
                if setting.read == "most likely":
                    chosen = logprobs.amax(dim=-1)
                else:
                    ids = torch.from_numpy(sequence.tokens).to(logprobs.device)
                    chosen = logprobs.gather(-1, ids[:, None]).squeeze(-1)
                values[sequence.places] = chosen.cpu().double().numpy()
        return values

    def _shaped(self, sequence: ScoredSequence, logits: Tensor, setting: Setting) -> Tensor:
        """Return the logits as the setting processes them before a token is drawn."""
        sample = self.case.samples[sequence.sample]
        mode = sample.logprob_mode if setting.mode == "recorded" else setting.mode
        if mode == "raw":
            return logits
        temperature = sample.temperature if setting.temperature is None else setting.temperature
        if setting.shaping is None and not sample.shaping:
            return logits if temperature in (0.0, 1.0) else logits / temperature
        spans: Sequence[ShapedSpan] = sample.shaping
        if setting.shaping is not None:
            shaping = Shaping(**dict(setting.shaping))
            spans = [ShapedSpan(start, end, shaping) for start, end in turns(sample)]
        recorded = setting.support == "recorded" and setting.shaping is None
        return shaped_logits(
            logits, self.case.positions[sequence.places], sample.token_ids, spans, temperature,
            grammars=self._grammars if self._needs_grammar(sample) else None,
            support=sample.support if recorded else None,
        )  # fmt: skip

    def _needs_grammar(self, sample: Sample) -> bool:
        return any(span.shaping.grammar is not None for span in sample.shaping)

    # Stored results

    def _path(self, setting: Setting) -> Path | None:
        if self._memo is None:
            return None
        key = f"{self.case.digest} {self._stamps} {setting!r}"
        return self._memo / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"

    @cached_property
    def _stamps(self) -> str:
        """The directories in use and when they changed, so that old results are not used."""
        case = self.case
        paths = [case.checkpoint, *(path for _, path in case.others), *case.other_adapters]
        paths += [] if case.adapter is None else [case.adapter]
        return " ".join(
            f"{path}:{max(file.stat().st_mtime_ns for file in path.iterdir())}" for path in paths
        )

    def _load(self, setting: Setting) -> Values | None:
        path = self._path(setting)
        if path is None or not path.exists():
            return None
        values: Values = np.load(path, allow_pickle=False)
        return values if values.shape == (self.case.tokens,) else None

    def _store(self, setting: Setting) -> None:
        if (path := self._path(setting)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".tmp")
            with open(scratch, "wb") as file:
                np.save(file, self._values[setting])
            scratch.replace(path)


@contextmanager
def _rounded_head(model: Any, setting: Setting) -> Iterator[None]:
    """Let the head multiply and return values of the given format within the block."""
    kind = setting.head
    if kind is None:
        yield
        return
    head = model.get_output_embeddings()
    before = head.register_forward_pre_hook(
        lambda _, args: (round_values(args[0], kind), *args[1:])
    )
    after = head.register_forward_hook(lambda _, __, out: round_values(out, kind))
    weight = head.weight.data.clone()
    head.weight.data.copy_(round_values(weight, kind))
    try:
        yield
    finally:
        head.weight.data.copy_(weight)
        before.remove()
        after.remove()


def _boundary(case: Case, sample: int, kind: str, block: int) -> int:
    """Return the position before which a cache is stale."""
    groups = [group for group in case.groups if group.sample == sample]
    if kind == "version":
        first = groups[0].version
        later = [group.start for group in groups if group.version != first]
        at = later[0] if later else groups[-1].end
    elif kind in ("last turn", "turn before"):
        last = groups[-1].turn
        at = next(group.start for group in groups if group.turn == last)
        if kind == "turn before":  # what was cached when the turn before ended
            at = max([g.end for g in groups if g.turn < last] or [at])
    else:
        at = groups[0].start
    # The last token of a prompt is always computed anew, for its logits.
    return (at - 1) // block * block


def _with_dummy_route(sample: Sample) -> Sample:
    """Return the sample with the route of each turn's last token replaced by experts 0 to k-1."""
    if sample.experts is None:
        return sample
    ids = sample.experts.numpy().copy()
    dummy = np.arange(ids.shape[2], dtype=ids.dtype)
    mask = [*sample.sampled_mask, False]
    for at in range(len(sample.token_ids)):
        row = at - sample.experts.start
        if mask[at] and not mask[at + 1] and 0 <= row < len(ids):
            ids[row] = dummy
    experts = RoutedExperts(ids.tobytes(), sample.experts.shape, sample.experts.dtype,
                            sample.experts.start)  # fmt: skip
    return replace(sample, experts=experts)
