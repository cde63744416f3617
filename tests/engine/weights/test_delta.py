"""An engine stages a delta on its live weights and holds exactly the weights of a full one."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.delta.record import PAYLOADS, DeltaLink, read_link
from lockstep.checkpoint.validate import Checkpoint
from lockstep.engine.config import ModelConfig
from lockstep.engine.options import EngineOptions
from lockstep.engine.probe import save_checkpoint
from lockstep.engine.weights import apply_delta
from lockstep.engine.weights.served import ServedWeights
from lockstep.models import bundled
from lockstep.tokens.errors import CheckpointError


@cache
def model_of(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(bundled(name), dtype=dtype)


def nudge(model: Any, step: int) -> None:
    """Change one value in fifty of every tensor, as a small learning rate does in bf16."""
    rng = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            hit = torch.rand(parameter.shape, generator=rng) < 0.02
            parameter[hit] *= 1.01


def save_chain(model: Any, parent: Path, links: int, **options: Any) -> list[Path]:
    """step-0 in full and then deltas, each of the model one nudge later."""
    paths = [save_checkpoint(model, parent / "step-0", probe=False)]
    for step in range(1, links + 1):
        nudge(model, step)
        paths.append(
            save_checkpoint(
                model, parent / f"step-{step}", probe=False, base=paths[-1],
                version=f"step-{step}", **options,
            )
        )  # fmt: skip
    return paths


def served(path: Path, dtype: str) -> ServedWeights:
    return ServedWeights(path, ModelConfig.read(path), EngineOptions(dtype=dtype))


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(tensor, b.packed[name]) for name, tensor in a.packed.items())


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_staging_a_delta_reads_only_the_delta(name: str, dtype: str, tmp_path: Path) -> None:
    model = model_of(name, getattr(torch, dtype))
    paths = save_chain(model, tmp_path, 2)
    link = read_link(paths[2])
    assert link is not None
    assert link.nbytes < link.record.full_bytes / 10
    live = served(paths[1], dtype)
    kept = live.weights.packed.copied()
    (paths[0] / "model.safetensors").unlink()  # what only the chain needs
    staged = live.load_weights(paths[2], "step-2")
    fresh = save_checkpoint(model, tmp_path / "whole", probe=False)
    whole = live.load_weights(fresh, "whole")
    assert equal(staged, whole)
    assert staged.digest == whole.digest == link.record.digest
    assert all(torch.equal(kept[name], tensor) for name, tensor in live.weights.packed.items())


def test_a_worker_on_other_weights_takes_the_last_full_one_and_the_chain(tmp_path: Path) -> None:
    model = model_of("tiny", torch.bfloat16)
    paths = save_chain(model, tmp_path, 3)
    joined = served(paths[0], "bfloat16").load_weights(paths[3], "step-3")
    started = served(paths[3], "bfloat16").weights
    whole = served(save_checkpoint(model, tmp_path / "whole", probe=False), "bfloat16").weights
    assert equal(joined, whole)
    assert equal(started, whole)
    assert joined.digest == whole.digest == started.digest


def test_weights_served_in_another_dtype_are_read_from_the_chain(tmp_path: Path) -> None:
    model = model_of("tiny", torch.bfloat16)
    paths = save_chain(model, tmp_path, 1)
    live = served(paths[0], "float32")
    whole = save_checkpoint(model, tmp_path / "whole", probe=False)
    assert equal(live.load_weights(paths[1], "1"), live.load_weights(whole, "1"))


@pytest.mark.failure_mode("F63")
def test_live_weights_that_are_not_what_they_say_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("tiny", torch.bfloat16)
    paths = save_chain(model, tmp_path, 1)
    live = served(paths[0], "bfloat16")
    live.weights.packed["layers.0.out"][0, 0] += 1
    whole = save_checkpoint(model, tmp_path / "whole", probe=False)
    staged = live.load_weights(paths[1], "1")
    assert "reading its chain: tensor 'model.layers.0.self_attn.o_proj.weight'" in caplog.text
    assert equal(staged, live.load_weights(whole, "1"))


@pytest.mark.failure_mode("F63")
def test_a_delta_is_not_applied_twice_or_out_of_order(tmp_path: Path) -> None:
    paths = save_chain(model_of("tiny", torch.bfloat16), tmp_path, 2)
    links = [read_link(path) for path in paths]
    live = served(paths[1], "bfloat16").weights
    assert [link and apply_delta.applies_to(link, live) for link in links] == [None, False, True]
    first = served(paths[0], "bfloat16").weights
    assert isinstance(links[2], DeltaLink)
    with pytest.raises(CheckpointError, match="not what was written after link 'step-2'"):
        apply_delta.with_delta(first, links[2], "skipped step-1")


@pytest.mark.failure_mode("F63")
def test_a_corrupted_payload_stages_nothing(tmp_path: Path) -> None:
    paths = save_chain(model_of("tiny", torch.bfloat16), tmp_path, 1)
    path = paths[1] / PAYLOADS
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    live = served(paths[0], "bfloat16")
    with pytest.raises(CheckpointError, match="'step-1'"):
        live.load_weights(paths[1], "step-1")


def test_not_a_number_in_a_delta_is_refused(tmp_path: Path) -> None:
    model = model_of("tiny", torch.float32)
    base = save_checkpoint(model, tmp_path / "step-0", probe=False)
    kept = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    path = save_checkpoint(model, tmp_path / "step-1", probe=False, base=base)
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        served(base, "float32").load_weights(path, "step-1")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.* is NaN or infinite"):
        Checkpoint.validate(path)


def test_a_full_checkpoint_is_due_after_some_deltas_or_a_large_change(tmp_path: Path) -> None:
    model = model_of("tiny", torch.bfloat16)
    paths = save_chain(model, tmp_path, 5, anchor_every=3)
    depths = [link and link.record.depth for link in map(read_link, paths)]
    assert depths == [None, 1, 2, None, 1, 2]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    far = save_checkpoint(model, tmp_path / "far", probe=False, base=paths[-1])
    assert read_link(far) is None
    assert Checkpoint.validate(far).delta is None


@pytest.mark.failure_mode("F89")
def test_a_broken_base_makes_the_next_checkpoint_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("tiny", torch.bfloat16)
    paths = save_chain(model, tmp_path, 2)
    shutil.rmtree(paths[1])
    nudge(model, 9)
    path = save_checkpoint(model, tmp_path / "step-3", probe=False, base=paths[2])
    assert read_link(path) is None
    assert "saving a full checkpoint, because the base is broken" in caplog.text
    with pytest.raises(CheckpointError, match="both need the same parent"):
        save_checkpoint(model, tmp_path / "below" / "x", probe=False, base=path)


def test_a_delta_has_the_files_that_others_need(tmp_path: Path) -> None:
    paths = save_chain(model_of("tiny", torch.bfloat16), tmp_path, 1)
    names = {path.name for path in paths[1].iterdir()}
    assert {"config.json", "delta.json", PAYLOADS, "manifest.json", "STABLE"} <= names
    assert not any(name.startswith("model") for name in names)
