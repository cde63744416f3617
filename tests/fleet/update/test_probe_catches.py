"""The probe notices every single wrong tensor, and finds nothing wrong with the right weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.probe import Probe, Verdict, compare
from lockstep.engine import EngineOptions
from lockstep.engine.core import Core
from lockstep.engine.probe import cover_experts, write_probe
from lockstep.engine.weights.weights import Weights
from lockstep.models import bundled
from tests.engine import checkpoints

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MODELS = ("tiny", "tiny-moe", "untied")
pytestmark = pytest.mark.exact_arithmetic
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """A worker that served `old` and was sent `new`, and the probe for `new`."""

    core: Core
    old: Tensors
    new: Tensors
    right: Weights
    probe: Probe

    def verdict(self, wrong: Tensors) -> Verdict:
        """What the probe says of the new weights with some tensors replaced."""
        return compare(self.probe.logprobs, self.scores(wrong), self.probe.tolerance or 0.0)

    def scores(self, wrong: Tensors) -> list[list[float]]:
        weights = self.right.with_tensors(wrong.items(), "wrong") if wrong else self.right
        return [self.core.score(list(ids), weights=weights) for ids in self.probe.sequences]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


@cache
def trial(name: str, directory: Path) -> Trial:
    torch.set_num_threads(1)
    source = bundled("tiny" if name == "untied" else name)
    assert source is not None
    if name == "untied":
        tensors = checkpoints.tensors_of(source)
        tensors[HEAD] = tensors[EMBEDDING] * 1.1
        source = checkpoints.save(source, directory / "untied", tensors)
        checkpoints.edit_json(source / "config.json", tie_word_embeddings=False)
    # Steps of training are small: so is what a stale tensor differs by.
    target = checkpoints.variant(source, directory / f"{name}-new", seed=1, scale=1e-3)
    core = Core(source, EngineOptions(max_model_len=512, max_seqs=1, arithmetic="exact"))
    probe = write_probe(checkpoints.trainer(target), target)
    right = core.served.load_weights(target, "new")
    old, new = checkpoints.tensors_of(source), checkpoints.tensors_of(target)
    return Trial(core, old, new, right, probe)


def corruption(rng: random.Random, trial: Trial) -> tuple[str, Tensors]:
    """One way for an engine to be silently wrong."""
    old, new = trial.old, trial.new
    layer = f"model.layers.{rng.randrange(2)}."
    kinds = ["scaled", "noisy", "stale", "norm", "fused"]
    kinds += ["head"] if HEAD in new else []
    kinds += ["expert", "expert"] if any("experts" in name for name in new) else []
    kind = rng.choice(kinds)
    match kind:
        case "scaled":
            name = rng.choice(sorted(new))
            return f"{name} scaled", {name: new[name] * (1 + rng.choice((-1e-3, 1e-3)))}
        case "noisy":
            name = rng.choice(sorted(new))
            noise = torch.randn(
                new[name].shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))
            )
            return f"{name} with noise", {name: new[name] * (1 + 1e-3 * noise)}
        case "norm":
            name = rng.choice(sorted(name for name in new if "norm" in name))
            return f"{name} stale", {name: old[name]}
        case "fused":
            parts = rng.sample(("q_proj", "k_proj", "v_proj"), rng.choice((1, 2)))
            names = [f"{layer}self_attn.{part}.weight" for part in parts]
            return f"{names} stale", {name: old[name] for name in names}
        case "head":
            return "head stale", {HEAD: old[HEAD]}
        case "expert":
            expert = f"{layer}mlp.experts.{rng.randrange(8)}."
            return f"{expert} stale", {n: t for n, t in old.items() if n.startswith(expert)}
        case _:
            name = rng.choice(sorted(new))
            return f"{name} stale", {name: old[name]}


@pytest.mark.failure_mode("F28")
@pytest.mark.parametrize("name", MODELS)
def test_the_right_weights_pass_with_no_difference_at_all(name: str, directory: Path) -> None:
    tried = trial(name, directory)
    assert tried.probe.tolerance == 0.0
    assert tried.verdict({}) == Verdict(True, 0.0)


@pytest.mark.failure_mode("F28")
def test_one_wrong_tensor_is_caught_in_every_case_of_200(directory: Path) -> None:
    rng = random.Random(5)
    missed = []
    for case in range(200):
        tried = trial(MODELS[case % len(MODELS)], directory)
        what, wrong = corruption(rng, tried)
        verdict = tried.verdict(wrong)
        if verdict.passed or not verdict.max_difference > 0.0 or verdict.where is None:
            missed.append((MODELS[case % len(MODELS)], what, verdict))
    assert not missed


@pytest.mark.failure_mode("F28")
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_the_model_is_seen_by_the_probe(name: str, directory: Path) -> None:
    tried = trial(name, directory)
    blind = [name for name in sorted(tried.new) if tried.verdict({name: tried.old[name]}).passed]
    assert not blind


@pytest.mark.failure_mode("F28")
def test_a_trainer_adds_sequences_until_every_expert_takes_part(directory: Path) -> None:
    tried = trial("tiny-moe", directory)
    model = checkpoints.trainer(directory / "tiny-moe-new")
    assert len(cover_experts(model, [[1, 2, 3]])) > 1
    probe = write_probe(model, directory, sequences=cover_experts(model, [[1, 2, 3]]))
    narrow = replace(tried, probe=probe)
    assert not [name for name in tried.new if narrow.verdict({name: tried.old[name]}).passed]
