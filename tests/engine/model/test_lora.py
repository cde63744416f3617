"""LoRA adapters: several in one batch, swapped while serving, never silently replaced by the
base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.model.lora import Adapter, adapter_rows
from lockstep.tokens.errors import AdapterError, Busy, Forbidden, UnknownModel
from tests.engine import checkpoints
from tests.engine.rig import Rig, ids

PROMPT = ids(1, 40)


@pytest.fixture
def rig(tiny: Path, lora_a: Path, lora_b: Path) -> Rig:
    rig = Rig(tiny, weight_version="v1", max_seqs=6, max_batch_tokens=64)
    rig.adopt("a", lora_a, "1")
    rig.adopt("b", lora_b, "1")
    return rig


@pytest.fixture
def copy(lora_a: Path, tmp_path: Path) -> Path:
    """An adapter that a test may damage."""
    return shutil.copytree(lora_a, tmp_path / "copy")


@pytest.mark.exact_arithmetic
def test_adapters_and_base_in_one_batch_give_the_same_results_as_alone(rig: Rig) -> None:
    names = [None, "a", "b", None, "a", "b"]
    alone = [rig.generate(ids(i, 20 + 9 * i), adapter=n, seed=i) for i, n in enumerate(names)]
    rig.forget_prefixes()
    together = [rig.submit(ids(i, 20 + 9 * i), adapter=n, seed=i) for i, n in enumerate(names)]
    rig.run()
    assert [result.one for result in together] == alone
    same_prompt = {n: tuple(rig.generate(PROMPT, adapter=n).logprobs) for n in (None, "a", "b")}
    assert len(set(same_prompt.values())) == 3


def with_head(adapter: Path) -> dict[str, torch.Tensor]:
    """Add an update of the head to an adapter; return its two matrices."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    rank = next(value for name, value in tensors.items() if "lora_A" in name).shape[0]
    source = torch.Generator().manual_seed(7)
    head = {
        "base_model.model.lm_head.lora_A.weight": torch.randn(rank, 128, generator=source) * 0.1,
        "base_model.model.lm_head.lora_B.weight": torch.randn(512, rank, generator=source) * 0.1,
    }
    save_file(tensors | head, file)
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    checkpoints.edit_adapter(adapter, target_modules=[*targets, "lm_head"])
    return head


def test_an_adapter_of_a_tied_head_changes_logits_and_not_the_embeddings(
    rig: Rig, copy: Path
) -> None:
    head = with_head(copy)
    rig.adopt("head", copy)
    served = rig.core.served
    hidden = torch.randn(8, 128, generator=torch.Generator().manual_seed(3))
    adapters = [served.adapter("head"), None, served.adapter("a"), served.adapter("head")]
    with torch.inference_mode():
        plain = rig.core.model.logits(served.weights, hidden, range(4))
        logits = rig.core.model.logits(served.weights, hidden, range(4), adapters)
    a, b = head.values()
    expected = plain + hidden[:4] @ a.T @ b.T * served.adapter("head").scaling
    torch.testing.assert_close(logits[[0, 3]], expected[[0, 3]])
    assert torch.equal(logits[[1, 2]], plain[[1, 2]])


@pytest.mark.exact_arithmetic
def test_an_adapted_head_samples_and_scores_equally_alone_and_in_a_batch(
    rig: Rig, copy: Path
) -> None:
    with_head(copy)
    rig.adopt("head", copy)
    names = [None, "head", "b", "head", "a"]
    alone = [rig.generate(ids(i, 20 + 9 * i), adapter=n, seed=i) for i, n in enumerate(names)]
    rig.forget_prefixes()
    together = [rig.submit(ids(i, 20 + 9 * i), adapter=n, seed=i) for i, n in enumerate(names)]
    rig.run()
    assert [result.one for result in together] == alone
    own, other = alone[1], rig.generate(ids(1, 29), adapter="a", seed=1)
    assert own.logprobs != other.logprobs
    scored = rig.core.score(ids(1, 29) + own.token_ids, adapter="head")
    assert scored[-len(own.token_ids) :] == own.logprobs


def test_version_labels_name_the_adapter(rig: Rig) -> None:
    completion = rig.generate(PROMPT, adapter="a")
    label = rig.core.served.adapter("a").label
    assert label.startswith("1.")
    assert (completion.adapter, completion.versions[0].version) == ("a", f"v1+a@{label}")
    assert rig.generate(PROMPT).versions[0].version == "v1"


@pytest.mark.failure_mode("F31")
def test_an_unknown_or_unloaded_adapter_is_an_error_not_the_base_model(rig: Rig) -> None:
    with pytest.raises(UnknownModel, match="'nobody' is not loaded"):
        rig.submit(PROMPT, adapter="nobody")
    with pytest.raises(UnknownModel, match="'nobody'"):
        rig.core.score(PROMPT, adapter="nobody")
    rig.core.served.remove_adapter("a")
    with pytest.raises(UnknownModel, match="'a' is not loaded"):
        rig.submit(PROMPT, adapter="a")
    with pytest.raises(UnknownModel, match="'a' is not loaded"):
        rig.core.served.remove_adapter("a")


@pytest.mark.failure_mode("F31")
def test_an_adapter_unloaded_before_its_request_starts_is_an_error(rig: Rig) -> None:
    rig.pause("keep")
    result = rig.submit(PROMPT, adapter="a", n=2)
    rig.core.served.remove_adapter("a")
    rig.core.resume()
    rig.run()
    assert isinstance(result.error, UnknownModel)
    assert rig.idle


@pytest.mark.failure_mode("F30")
def test_a_path_reloaded_with_new_contents_serves_the_new_contents(
    rig: Rig, tiny: Path, copy: Path, lora_b: Path
) -> None:
    rig.adopt("hot", copy)
    first = rig.generate(PROMPT, adapter="hot")
    for file in lora_b.iterdir():
        shutil.copy(file, copy)
    assert rig.adopt("hot", copy) is True
    second = rig.generate(PROMPT, adapter="hot")
    assert second.logprobs == rig.generate(PROMPT, adapter="b").logprobs
    assert second.logprobs != first.logprobs
    assert second.versions[0].version != first.versions[0].version


@pytest.mark.failure_mode("F30")
def test_a_hot_swap_under_the_same_label_reuses_no_keys(rig: Rig, lora_b: Path) -> None:
    rig.generate(PROMPT, adapter="a")
    hits = rig.core.prefixes.hits
    rig.adopt("a", lora_b, "1")
    completion = rig.generate(PROMPT, adapter="a")
    assert rig.core.prefixes.hits == hits
    assert completion.logprobs == rig.generate(PROMPT, adapter="b").logprobs


def test_requests_in_flight_keep_the_adapter_they_started_with(rig: Rig, lora_b: Path) -> None:
    alone = rig.submit(PROMPT, adapter="a", n=9, max_tokens=12)
    rig.run()
    rig.forget_prefixes()
    flying = rig.submit(PROMPT, adapter="a", n=9, max_tokens=12)
    rig.run(4)
    rig.adopt("a", lora_b, "2")
    fresh = rig.submit(PROMPT, adapter="a", max_tokens=12)
    rig.run(2)
    rig.core.served.remove_adapter("a")
    rig.run()
    assert flying.completions == alone.completions
    assert isinstance(fresh.error, UnknownModel) or "a@2." in fresh.one.versions[0].version


@pytest.mark.exact_arithmetic
def test_a_weight_swap_keeps_the_adapter(rig: Rig, tiny2: Path) -> None:
    result = rig.submit(PROMPT, adapter="b", max_tokens=16)
    rig.run(5)
    rig.load(tiny2, "v2")
    rig.run()
    label = rig.core.served.adapter("b").label
    assert [s.version for s in result.one.versions] == [f"v1+b@{label}", f"v2+b@{label}"]
    cut = result.one.versions[1].start
    scored = rig.core.score(PROMPT + result.one.token_ids, adapter="b")[-16:]
    assert result.one.logprobs[cut:] == scored[cut:]
    assert result.one.logprobs[:cut] != scored[:cut]


@pytest.mark.failure_mode("F29")
def test_a_swap_to_a_broken_adapter_leaves_the_old_one_served(rig: Rig, copy: Path) -> None:
    before = rig.generate(PROMPT, adapter="a")
    (copy / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(AdapterError, match="says that its header has"):
        rig.adopt("a", copy)
    rig.forget_prefixes()
    assert rig.generate(PROMPT, adapter="a") == before


@pytest.mark.failure_mode("F32")
def test_ten_thousand_adapter_names_leak_nothing(rig: Rig, tiny: Path) -> None:
    policy, loaded = rig.core.served, rig.core.served.adapter("a")
    for i in range(10_000):
        policy.add_adapter(Adapter(f"n{i}", loaded.path, "x", loaded.scaling, loaded.deltas))
        if i % 500 == 0:
            rig.generate(PROMPT, adapter=f"n{i}", max_tokens=1)
        policy.remove_adapter(f"n{i}")
    assert sorted(policy.adapters) == ["a", "b"]
    assert rig.idle
    assert len(rig.core.prefixes) <= rig.core.prefixes.capacity


def test_readers_of_the_adapters_are_not_disturbed_by_loads(rig: Rig, lora_a: Path) -> None:
    # GET /v1/models iterates on the event loop while the engine's thread loads and unloads.
    names = []
    for name in rig.core.served.adapters:
        rig.adopt(f"next to {name}", lora_a)
        rig.core.served.remove_adapter(name)
        names.append(name)
    assert names == ["a", "b"]


def test_one_adapter_too_many_is_rejected_but_a_swap_is_not(tiny: Path, lora_a: Path) -> None:
    rig = Rig(tiny, max_adapters=2)
    assert [rig.adopt(name, lora_a) for name in ("x", "y", "x")] == [False, False, True]
    with pytest.raises(Busy, match="2 adapters are loaded, which is the limit"):
        rig.adopt("z", lora_a)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"r": 65}, "rank 65 is greater than max_lora_rank 64"),
        ({"r": 0}, "rank 0"),
        ({"r": "4"}, "rank '4'"),
        ({"r": 5}, r"has shape \(4, 128\), expected \(5, 128\)"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"lora_alpha": 1e308}, r"lora_alpha 1e\+308"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000"),
        ({"lora_alpha": True}, "lora_alpha True"),
        ({"r": True}, "rank True"),
        ({"r": [[[]]]}, "rank"),
    ],
)
def test_unsupported_settings_are_rejected(
    rig: Rig, copy: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(AdapterError, match=says):
        rig.adopt("x", checkpoints.edit_adapter(copy, **settings))
    assert "x" not in rig.core.served.adapters


def test_tensors_that_do_not_fit_are_rejected(rig: Rig, lora_a: Path, copy: Path) -> None:
    file = "adapter_model.safetensors"
    good = load_file(lora_a / file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    cases = {
        "names layer 9": {name.replace("layers.0", "layers.9"): good[name]},
        "targets 'x_proj'": {name.replace("q_proj", "x_proj"): good[name]},
        "is not a LoRA weight": {"base_model.model.embed_tokens.lora_A.weight": good[name]},
        "lora_B of lm_head has shape None": {"base_model.model.lm_head.lora_A.weight": good[name]},
        "lora_B of q_proj in layer 0 has shape None": {name: good[name]},
        "NaN or infinite": good | {name: good[name] * torch.nan},
        "is I32, expected one of": good | {name: good[name].to(torch.int32)},
        "layers.99999.* is not a LoRA": {
            name.replace("layers.0", "layers." + "9" * 400): good[name]
        },
        "holds no LoRA tensors": {},
        "expected \\(4, 128\\)": good | {name: good[name][:, :-1].contiguous()},
    }
    for says, tensors in cases.items():
        save_file(tensors, copy / file)
        with pytest.raises(AdapterError, match=says):
            rig.adopt("x", copy)


@pytest.mark.failure_mode("F33")
def test_a_symlink_out_of_the_roots_is_forbidden(rig: Rig, lora_a: Path, copy: Path) -> None:
    load = rig.core.served.load_adapter
    assert load("x", copy, roots=(copy.parent,)).name == "x"
    (copy / "adapter_model.safetensors").unlink()
    (copy / "adapter_model.safetensors").symlink_to(lora_a / "adapter_model.safetensors")
    with pytest.raises(Forbidden, match="symlink out of the allowed roots"):
        load("x", copy, roots=(copy.parent,))
    assert load("x", copy, roots=(copy.parent, lora_a)).name == "x"


def test_a_directory_without_an_adapter_is_rejected(rig: Rig, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="cannot be read"):
        rig.adopt("x", tmp_path)
    for text in ("{", "[" * 100_000, '{"r": ' + "[" * 100_000 + "}", '{"r": 4, "r": 8}', "[]"):
        (copy / "adapter_config.json").write_text(text)
        with pytest.raises(AdapterError, match=r"is not sound JSON|expected an object"):
            rig.adopt("x", copy)


def test_experts_cannot_be_targeted(moe: Path, copy: Path) -> None:
    rig = Rig(moe)
    file = copy / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file({name: torch.zeros(4, 128)}, file)
    with pytest.raises(AdapterError, match="targets 'up_proj' in layer 0"):
        rig.adopt("x", copy)


def test_the_label_depends_on_contents_and_scaling(rig: Rig, lora_a: Path, copy: Path) -> None:
    def label(path: Path) -> str:
        return rig.core.served.load_adapter("x", path).label

    assert label(lora_a) == label(copy)
    assert label(lora_a) != label(checkpoints.edit_adapter(copy, lora_alpha=9))


def test_every_row_of_a_run_belongs_to_its_adapter(rig: Rig) -> None:
    a, b = (rig.core.served.adapter(name) for name in "ab")
    runs = [(None, 2), (a, 3), (b, 1), (None, 1), (a, 0), (a, 2), (b, 2)]
    rows = adapter_rows(runs, torch.device("cpu"), lambda adapter: 2 if adapter is a else 1)
    assert [(each.adapter, each.rows.tolist(), each.multiple) for each in rows] == [
        (a, [2, 3, 4, 7, 8], 2),
        (b, [5, 9, 10], 1),
    ]
    assert adapter_rows([(None, 3)], torch.device("cpu")) == []


@pytest.mark.parametrize("rslora", [False, True])
def test_the_scaling_is_that_of_peft(rig: Rig, copy: Path, rslora: bool) -> None:
    checkpoints.edit_adapter(copy, use_rslora=rslora, lora_alpha=6)
    assert rig.core.served.load_adapter("x", copy).scaling == (6 / 2 if rslora else 6 / 4)
