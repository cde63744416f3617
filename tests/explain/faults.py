"""Faults that are injected into a real embedded engine, or into a real trainer, and their names.

To add one, write a function from a Scene to a Case and put it into `FAULTS` with the cause that
must be named first:

    @fault("temperature")
    def engine_divides_by_another_temperature(scene: Scene) -> Case:
        scene.sampling = {"temperature": 0.7}
        return scene.case(relabel(scene.rollout(), temperature=1.0))

`python -m tests.explain.collection` runs all of them and prints the score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine import Engine, exact
from lockstep.explain.case import Case
from lockstep.explain.rounding import round_values, round_weight
from lockstep.tokens import Sample
from tests.engine import checkpoints
from tests.explain.scene import Scene, mixed, relabel

Values = list[float]


@dataclass(frozen=True)
class Fault:
    """One fault: `inject` returns the case, in which one of `causes` must be named first."""

    name: str
    causes: tuple[str, ...]
    inject: Callable[[Scene], Case]
    model: str = "tiny"
    where: str = ""


FAULTS: list[Fault] = []


def fault(*causes: str, model: str = "tiny", where: str = "") -> Callable[[Any], Any]:
    """Put the function into FAULTS. `where` must occur in the location of the first cause."""

    def add(function: Callable[[Scene], Case]) -> Callable[[Scene], Case]:
        FAULTS.append(Fault(function.__name__, causes, function, model, where))
        return function

    return add


# Weights


@fault("old_weights")
def update_was_skipped(scene: Scene) -> Case:
    scene.served = scene.old
    return scene.case(scene.rollout())


@fault("old_weights", where="w1")
def one_of_two_workers_is_stale(scene: Scene) -> Case:
    fresh = relabel(scene.rollout(count=3), workers=("w0",))
    scene.served = scene.old
    stale = relabel(scene.rollout(count=3, seed=9), workers=("w1",))
    return scene.case([*fresh, *stale])


@fault("old_tensors", where="layer 1")
def one_layer_is_stale(scene: Scene) -> Case:
    scene.served = mixed(scene.new, scene.old, scene.scratch / "s", ["model.layers.1."])
    return scene.case(scene.rollout())


@fault("old_tensors", where="layers.0.self_attn.q_proj")
def one_tensor_is_stale(scene: Scene) -> Case:
    names = ["model.layers.0.self_attn.q_proj"]
    scene.served = mixed(scene.new, scene.old, scene.scratch / "s", names)
    return scene.case(scene.rollout())


@fault("old_tensors", where="norm")
def norms_are_stale(scene: Scene) -> Case:
    names = ["model.norm", "model.layers.0.input_layernorm"]
    scene.served = mixed(scene.new, scene.old, scene.scratch / "s", names)
    return scene.case(scene.rollout())


@fault("old_tensors", where="lm_head")
def tied_head_is_stale(scene: Scene) -> Case:
    tensors = checkpoints.tensors_of(scene.new)
    old = checkpoints.tensors_of(scene.old)["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = old
    scene.served = checkpoints.save(scene.new, scene.scratch / "s", tensors)
    checkpoints.edit_json(scene.served / "config.json", tie_word_embeddings=False)
    return scene.case(scene.rollout())


@fault("old_tensors", where="experts.3", model="tiny-moe")
def one_expert_is_stale(scene: Scene) -> Case:
    names = ["model.layers.0.mlp.experts.3."]
    scene.served = mixed(scene.new, scene.old, scene.scratch / "s", names)
    return scene.case(scene.rollout())


@fault("old_weights", model="tiny-moe")
def update_of_experts_was_skipped(scene: Scene) -> Case:
    scene.served = scene.old
    return scene.case(scene.rollout())


@fault("wrong_version_label", where="turn 1")
def tokens_are_labelled_with_the_next_version(scene: Scene) -> Case:
    scene.served = scene.old
    right = scene.rollout(count=3, update_to=scene.new, labels=("old", "new"))
    wrong = scene.rollout(count=3, seed=9, update_to=scene.new)
    return scene.case([*right, *wrong], others=(("old", scene.old),))


@fault("stale_kv")
def prefix_cache_outlives_an_update(scene: Scene) -> Case:
    scene.served = scene.old
    samples = scene.rollout(update_to=scene.new, keep_cache=True, labels=("old", "new"))
    return scene.case(samples, others=(("old", scene.old),))


# Adapters


@fault("adapter_missing")
def adapter_is_not_applied(scene: Scene) -> Case:
    scene.adapter = checkpoints.adapter(scene.new, scene.scratch / "lora", seed=1)
    samples = relabel(scene.rollout(adapter=None), adapter="lora")
    return scene.case(samples)


@fault("adapter_wrong")
def previous_adapter_is_applied(scene: Scene) -> Case:
    wanted = checkpoints.adapter(scene.new, scene.scratch / "lora", seed=1)
    scene.adapter = checkpoints.adapter(scene.new, scene.scratch / "before", seed=2)
    samples = scene.rollout()
    return scene.case(samples, adapter=wanted, other_adapters=(scene.adapter,))


@fault("adapter_scale")
def adapter_is_scaled_by_another_alpha(scene: Scene) -> Case:
    wanted = checkpoints.adapter(scene.new, scene.scratch / "lora", seed=1, alpha=8)
    scene.adapter = checkpoints.adapter(scene.new, scene.scratch / "served", seed=1, alpha=16)
    return scene.case(scene.rollout(), adapter=wanted)


# Meaning of the number


@fault("raw_processed", "temperature")
def numbers_are_raw(scene: Scene) -> Case:
    scene.sampling = {"temperature": 0.7, "logprob_mode": "raw"}
    return scene.case(relabel(scene.rollout(), logprob_mode="processed"))


@fault("temperature")
def engine_divides_by_another_temperature(scene: Scene) -> Case:
    scene.sampling = {"temperature": 0.6}
    return scene.case(relabel(scene.rollout(), temperature=1.0))


@fault("penalty")
def repetition_penalty_is_a_default_of_the_server(scene: Scene) -> Case:
    scene.sampling = {"repetition_penalty": 1.1}
    return scene.case(relabel(scene.rollout(), shaping=()))


@fault("penalty")
def presence_penalty_is_a_default_of_the_server(scene: Scene) -> Case:
    scene.sampling = {"presence_penalty": 0.5}
    return scene.case(relabel(scene.rollout(), shaping=()))


@fault("truncation")
def top_k_is_a_default_of_the_server(scene: Scene) -> Case:
    scene.sampling = {"top_k": 20, "temperature": 1.5}
    return scene.case(relabel(scene.rollout(), shaping=(), support=None))


@fault("truncation")
def top_p_is_a_default_of_the_server(scene: Scene) -> Case:
    scene.sampling = {"top_p": 0.9, "temperature": 1.5}
    return scene.case(relabel(scene.rollout(), shaping=(), support=None))


@fault("truncation")
def min_p_is_a_default_of_the_server(scene: Scene) -> Case:
    scene.sampling = {"min_p": 0.05, "temperature": 1.5}
    return scene.case(relabel(scene.rollout(), shaping=(), support=None))


@fault("logit_bias")
def a_token_is_banned(scene: Scene) -> Case:
    scene.sampling = {"logit_bias": {20: -100.0}, "temperature": 1.5}
    return scene.case(relabel(scene.rollout(), shaping=()))


@fault("missing_zero")
def missing_numbers_are_zero(scene: Scene) -> Case:
    return scene.case(_edited(scene.rollout(), lambda own: [0.0, *own[1:-1], 0.0]))


@fault("off_by_one")
def numbers_are_shifted(scene: Scene) -> Case:
    return scene.case(_edited(scene.rollout(), lambda own: [*own[1:], own[-1]]))


@fault("mixed_choices")
def choices_are_matched_by_position(scene: Scene) -> Case:
    samples = scene.rollout(turns=1)
    swapped = [samples[at ^ 1] for at in range(len(samples))]
    return scene.case(
        [replace(s, logprobs=o.logprobs) for s, o in zip(samples, swapped, strict=True)]
    )


# Inputs


@fault("bos")
def engine_adds_a_first_token(scene: Scene) -> Case:
    return scene.case(scene.rollout(front=[504]))


@fault("context")
def engine_cuts_the_prompt(scene: Scene) -> Case:
    samples = scene.rollout(turns=1, front=list(range(40, 80)))
    long = [_in_front(sample, list(range(80, 90)) * 4) for sample in samples]
    cut = [shortened(sample, max(0, sample.sampled_mask.index(True) - 16)) for sample in samples]
    values = [_reference(scene, sample.token_ids) for sample in cut]
    return scene.case([_with_values(s, v) for s, v in zip(long, values, strict=True)])


# Definition of the model


@fault("rope")
def rope_theta_is_lost(scene: Scene) -> Case:
    scene.served = _configured(
        scene, rope_parameters={"rope_theta": 1_000_000.0, "rope_type": "default"}
    )
    return scene.case(scene.rollout())


@fault("rope")
def rope_theta_is_an_unusual_one(scene: Scene) -> Case:
    scene.served = _configured(
        scene, rope_parameters={"rope_theta": 23_000.0, "rope_type": "default"}
    )
    return scene.case(scene.rollout())


@fault("norm_eps")
def norm_constant_is_another(scene: Scene) -> Case:
    scene.served = _configured(scene, rms_norm_eps=1e-5)
    return scene.case(scene.rollout())


@fault("router_norm", model="tiny-moe")
def expert_weights_are_not_normalised(scene: Scene) -> Case:
    scene.served = _configured(scene, norm_topk_prob=False)
    return scene.case(scene.rollout())


@fault("weights_dtype")
def weights_are_rounded_to_bf16(scene: Scene) -> Case:
    scene.served = _rounded(scene, "bfloat16")
    return scene.case(scene.rollout())


@fault("weights_quantised")
def weights_are_quantised_to_int8(scene: Scene) -> Case:
    scene.served = _rounded(scene, "int8")
    return scene.case(scene.rollout())


@fault("compute_dtype", "weights_dtype")
def engine_computes_in_bf16(scene: Scene) -> Case:
    scene.options = {"dtype": "bfloat16"}
    return scene.case(scene.rollout())


@fault("kv_quantised")
def kv_cache_is_fp8(scene: Scene) -> Case:
    scene.sabotage = _round_kv("fp8")
    return scene.case(scene.rollout())


@fault("kv_dtype")
def kv_cache_is_bf16(scene: Scene) -> Case:
    scene.sabotage = _round_kv("bfloat16")
    return scene.case(scene.rollout())


@fault("head_dtype")
def head_is_bf16(scene: Scene) -> Case:
    def sabotage(engine: Engine) -> None:
        model, own = engine.core.model, engine.core.model.logits

        def logits(weights: Any, hidden: Tensor, *rest: Any, **more: Any) -> Tensor:
            low = hidden.bfloat16().float()
            head = weights.head
            before = head.clone()
            head.copy_(head.bfloat16().float())
            try:
                return own(weights, low, *rest, **more).bfloat16().float()
            finally:
                head.copy_(before)

        model.logits = logits  # type: ignore[method-assign]

    scene.sabotage = sabotage
    return scene.case(scene.rollout())


# Bf16 on both sides


@fault("old_weights")
def update_was_skipped_in_bf16(scene: Scene) -> Case:
    scene.options, scene.served = {"dtype": "bfloat16"}, scene.old
    return scene.case(scene.rollout(), engine_dtype="bfloat16")


@fault("temperature")
def another_temperature_in_bf16(scene: Scene) -> Case:
    scene.options, scene.sampling = {"dtype": "bfloat16"}, {"temperature": 0.7}
    samples = relabel(scene.rollout(), temperature=1.0)
    return scene.case(samples, engine_dtype="bfloat16")


# Routes


@fault("routed_experts", model="tiny-moe")
def engine_routes_otherwise(scene: Scene) -> Case:
    from lockstep.engine.model import model as module

    own = module.route
    rng = torch.Generator().manual_seed(5)

    def route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        noisy = logits + 2.0 * torch.randn(logits.shape, generator=rng)
        _, ids = own(noisy, k, normalize)
        weights = torch.softmax(logits, dim=-1).gather(-1, ids)
        return (weights / weights.sum(-1, keepdim=True) if normalize else weights), ids

    scene.options = {"arithmetic": "close", "prefix_cache_bytes": 0}
    module.route = route
    try:
        samples = scene.rollout(turns=1, choices=1, count=8, experts_start=0)
    finally:
        module.route = own
    return scene.case(samples)


# The trainer


@fault("off_by_one")
def trainer_does_not_shift_its_labels(scene: Scene) -> Case:
    def values(model: Any, sample: Sample) -> Values:
        logprobs = torch.log_softmax(_logits(model, sample.token_ids), dim=-1)
        return logprobs.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist()

    return _trained(scene, values)


@fault("support")
def trainer_normalises_over_the_whole_vocabulary(scene: Scene) -> Case:
    scene.sampling = {"top_p": 0.8, "temperature": 1.5}

    def values(model: Any, sample: Sample) -> Values:
        return [0.0, *exact.token_logprobs(model, sample.token_ids, 1.5).tolist()]

    return _trained(scene, values, support=True)


@fault("temperature", "raw_processed")
def trainer_ignores_the_temperature(scene: Scene) -> Case:
    scene.sampling = {"temperature": 0.8}

    def values(model: Any, sample: Sample) -> Values:
        return [0.0, *exact.token_logprobs(model, sample.token_ids).tolist()]

    return _trained(scene, values)


@fault("padding")
def trainer_attends_to_left_padding(scene: Scene) -> Case:
    samples = scene.rollout()
    longest = max(len(sample.token_ids) for sample in samples)

    def values(model: Any, sample: Sample) -> Values:
        pad = [503] * (longest - len(sample.token_ids))
        return _own(model, [*pad, *sample.token_ids])[len(pad) :]

    return _trained(scene, values, samples)


@fault("packing")
def trainer_packs_without_a_mask(scene: Scene) -> Case:
    samples = scene.rollout()
    before = {id(s): samples[at - 1].token_ids if at else [] for at, s in enumerate(samples)}

    def values(model: Any, sample: Sample) -> Values:
        front = before[id(sample)]
        return _own(model, [*front, *sample.token_ids])[len(front) :]

    return _trained(scene, values, samples)


@fault("window")
def trainer_has_a_sliding_window(scene: Scene) -> Case:
    from transformers import AutoModelForCausalLM

    windowed = AutoModelForCausalLM.from_pretrained(
        scene.new, dtype=torch.float32, use_sliding_window=True, sliding_window=24,
        layer_types=["sliding_attention"] * 2,
    ).eval()  # fmt: skip

    def values(_: Any, sample: Sample) -> Values:
        return _own(windowed, sample.token_ids)

    return _trained(scene, values)


@fault("old_weights")
def trainer_scores_under_old_weights(scene: Scene) -> Case:
    old = checkpoints.trainer(scene.old)
    return _trained(scene, lambda _, sample: _own(old, sample.token_ids))


@fault("not_sampled")
def trainer_reads_the_most_likely_token(scene: Scene) -> Case:
    scene.sampling = {"temperature": 1.0}

    def values(model: Any, sample: Sample) -> Values:
        best = torch.log_softmax(_logits(model, sample.token_ids), dim=-1).amax(-1)
        return [0.0, *best[:-1].tolist()]

    return _trained(scene, values)


@fault("retokenized")
def trainer_tokenizes_the_history_again(scene: Scene) -> Case:
    from transformers import AutoTokenizer

    scene.sampling = {"temperature": 2.5}
    tokenizer = AutoTokenizer.from_pretrained(scene.case([_one()]).tokenizer)

    def values(model: Any, sample: Sample) -> Values:
        out = [0.0] * len(sample.token_ids)
        for span in sample.versions:
            text = tokenizer.decode(sample.token_ids[: span.start])
            front = tokenizer.encode(text, add_special_tokens=False)
            own = _own(model, [*front, *sample.token_ids[span.start : span.end]], 2.5)
            out[span.start : span.end] = own[len(front) :]
        return out

    return _trained(scene, values)


@fault("dummy_route", model="tiny-moe")
def trainer_replays_a_dummy_route(scene: Scene) -> Case:
    from lockstep.engine.expert_replay import ExpertReplay
    from lockstep.engine.forward_pass import TokenRows

    model = checkpoints.trainer.__wrapped__(scene.new)
    replay = ExpertReplay(model)
    samples = scene.rollout(experts_start=0)

    def values(_: Any, sample: Sample) -> Values:
        assert sample.experts is not None
        ids = sample.experts.numpy().copy()
        for span in sample.versions:
            if span.end - 1 < len(ids):
                ids[span.end - 1] = np.arange(ids.shape[2])
        broken = replace(sample, experts=replace(sample.experts, data=ids.tobytes()))
        rows = TokenRows.arrange(model, [sample.token_ids], multiple=1)
        with torch.no_grad(), replay.of([broken], rows.width, torch.device("cpu")):
            logprobs = torch.log_softmax(rows.logits(model), dim=-1)
        own = torch.tensor(sample.token_ids[1:])
        return [0.0, *logprobs[: len(own)].gather(-1, own[:, None])[:, 0].tolist()]

    return _trained(scene, values, samples)


# Helpers


def _edited(samples: Sequence[Sample], change: Callable[[Values], Values]) -> list[Sample]:
    """Return samples with the logprobs of each turn changed."""
    edited = []
    for sample in samples:
        logprobs = list(sample.logprobs)
        for span in sample.versions:
            logprobs[span.start : span.end] = change(logprobs[span.start : span.end])
        edited.append(replace(sample, logprobs=logprobs))
    return edited


def _one() -> Sample:
    from lockstep.tokens import VersionSpan

    return Sample(token_ids=[1, 2], sampled_mask=[False, True], logprobs=[0.0, -1.0],
                  versions=(VersionSpan("new", 1, 2),))  # fmt: skip


def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return out


def _own(model: Any, ids: Sequence[int], temperature: float = 1.0) -> Values:
    """Return the logprob of every token; 0 for the first."""
    logprobs = torch.log_softmax(_logits(model, ids)[:-1] / temperature, dim=-1)
    own = torch.tensor(list(ids)[1:])
    return [0.0, *logprobs.gather(-1, own[:, None])[:, 0].tolist()]


def _reference(scene: Scene, ids: Sequence[int]) -> Values:
    return _own(checkpoints.trainer(scene.new), ids)


def _trained(
    scene: Scene, values: Callable[[Any, Sample], Values], samples: Sequence[Sample] = (),
    support: bool = False,
) -> Case:  # fmt: skip
    """Return the case of a trainer whose logprobs of a sample are `values`."""
    model = checkpoints.trainer(scene.new)
    samples = samples or scene.rollout(**({"support": True} if support else {}))
    numbers = [
        number
        for sample in samples
        for number, sampled in zip(values(model, sample), sample.sampled_mask, strict=True)
        if sampled
    ]
    return scene.case(samples, trainer=numbers)


def _in_front(sample: Sample, ids: list[int]) -> Sample:
    """Return the sample with more tokens in front."""
    more = len(ids)
    return replace(
        sample, token_ids=[*ids, *sample.token_ids],
        sampled_mask=[False] * more + list(sample.sampled_mask),
        logprobs=[0.0] * more + list(sample.logprobs),
        versions=tuple(replace(v, start=v.start + more, end=v.end + more)
                       for v in sample.versions), experts=None,
    )  # fmt: skip


def shortened(sample: Sample, count: int) -> Sample:
    """Return the sample without its first tokens."""
    return replace(
        sample, token_ids=sample.token_ids[count:], sampled_mask=sample.sampled_mask[count:],
        logprobs=sample.logprobs[count:],
        versions=tuple(replace(v, start=v.start - count, end=v.end - count)
                       for v in sample.versions), experts=None,
    )  # fmt: skip


def _with_values(sample: Sample, values: Values) -> Sample:
    """Return the sample with the last of these numbers as its logprobs."""
    count = sum(sample.sampled_mask)
    return replace(sample, logprobs=[0.0] * (len(sample.logprobs) - count) + values[-count:])


def _configured(scene: Scene, **changes: Any) -> Any:
    served = checkpoints.save(scene.new, scene.scratch / "s", checkpoints.tensors_of(scene.new))
    checkpoints.edit_json(served / "config.json", **changes)
    return served


def _rounded(scene: Scene, kind: Any) -> Any:
    tensors = {
        name: round_weight(tensor, kind)
        if kind == "bfloat16" or (tensor.dim() == 2 and "embed" not in name)
        else tensor
        for name, tensor in checkpoints.tensors_of(scene.new).items()
    }
    return checkpoints.save(scene.new, scene.scratch / "s", tensors)


def _round_kv(kind: Any) -> Callable[[Engine], None]:
    def sabotage(engine: Engine) -> None:
        cache = engine.core.cache
        write, write_run = cache.write, cache.write_run
        cache.write = lambda layer, places, kv: write(layer, places, round_values(kv, kind))  # type: ignore[method-assign]
        cache.write_run = lambda layer, slot, start, kv: write_run(  # type: ignore[method-assign]
            layer, slot, start, round_values(kv, kind)
        )

    return sabotage
