"""The probe as a value and a file, and what is concluded from scores."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint import safetensors_file as tensor_file
from lockstep.checkpoint.probe import Probe, Scores, builtin, compare
from lockstep.tokens.errors import BadRequest, CheckpointError

PROBE = Probe(((1, 2, 3), (4, 5)), ((-1.0, -2.0), (-3.0,)), 0.5)
NAN, INF = math.nan, math.inf


def test_a_probe_survives_its_file_with_every_bit(tmp_path: Path) -> None:
    probe = Probe(
        sequences=((0, 2**31), (5, 6, 7)),
        logprobs=((-math.pi,), (-5e-324, -1.7976931348623157e308)),
        tolerance=1e-300,
        adapter="name ünïcode",
        version="",
    )
    probe.write(tmp_path / "p")
    assert Probe.read(tmp_path / "p") == probe
    PROBE.write(tmp_path / "probe.safetensors")
    assert Probe.beside(tmp_path) == PROBE
    assert Probe.beside(tmp_path / "p") is None


def test_its_file_is_safetensors_to_others(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    PROBE.write(tmp_path / "p")
    saved = load_file(tmp_path / "p")
    assert saved["token_ids"].tolist() == [1, 2, 3, 4, 5]
    assert saved["lengths"].tolist() == [3, 2]
    assert saved["logprobs"].tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(
    ("sequences", "logprobs", "tolerance"),
    [
        ((), (), 0.0),
        (((1,),), ((),), 0.0),
        (((1, 2),), (), 0.0),
        (((1, 2),), ((-1.0, -1.0),), 0.0),
        (((1, -2),), ((-1.0,),), 0.0),
        (((1, 2),), ((NAN,),), 0.0),
        (((1, 2),), ((-INF,),), 0.0),
        (((1, 2),), ((0.1,),), 0.0),
        (((1, 2),), ((-1.0,),), NAN),
        (((1, 2),), ((-1.0,),), INF),
        (((1, 2),), ((-1.0,),), -1.0),
        (((1, 2),), ((-1.0,),), 1000.0),
        (((1, 2),) * 5000, ((-1.0,),) * 5000, 0.0),
        ((tuple(range(1, 300_001)),), ((-1.0,) * 299_999,), 0.0),
    ],
)
def test_a_probe_that_proves_nothing_is_refused(
    sequences: tuple[tuple[int, ...], ...], logprobs: tuple[tuple[float, ...], ...],
    tolerance: float,
) -> None:  # fmt: skip
    with pytest.raises(CheckpointError, match="probe"):
        Probe(sequences, logprobs, tolerance)


def test_the_size_of_a_probe_is_bounded_by_its_header(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "lockstep-probe-1", "tolerance": "0.0"},
        "lengths": {"dtype": "I64", "shape": [2_000_000], "data_offsets": [0, 16_000_000]},
        "token_ids": {
            "dtype": "I64", "shape": [4_000_000], "data_offsets": [16_000_000, 48_000_000]
        },
    }  # fmt: skip
    text = json.dumps(header).encode()
    path = tmp_path / "probe.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 48_000_000)
    with pytest.raises(CheckpointError, match="2000000 sequences of 4000000 tokens"):
        Probe.read(path)


GOOD = {"format": "lockstep-probe-1", "tolerance": "0.0"}


@pytest.mark.parametrize(
    ("ids", "lengths", "logprobs", "metadata"),
    [
        ([1, 2], [2], [-1.0], {}),
        ([1, 2], [2], [-1.0], GOOD | {"format": "other"}),
        ([1, 2], [2], [-1.0], GOOD | {"tolerance": "much"}),
        ([1, 2], [2], [-1.0], GOOD | {"tolerance": "nan"}),
        ([1, 2], [3], [-1.0], GOOD),
        ([1, 2], [2], [], GOOD),
        ([1, 2], [1, 1], [], GOOD),
        ([1, 2, 3], [4, -1], [-1.0], GOOD),
        ([], [], [], GOOD),
        ([[1, 2]], [2], [-1.0], GOOD),
        ([1.0, 2.0], [2], [-1.0], GOOD),
        ([1, 2], [2], None, GOOD),
    ],
)
def test_a_file_that_is_no_probe_is_refused(
    tmp_path: Path, ids: list[float], lengths: list[int], logprobs: list[float] | None,
    metadata: dict[str, str],
) -> None:  # fmt: skip
    kind = "<f8" if ids and isinstance(ids[0], float) else "<i8"
    arrays = {"token_ids": np.array(ids, kind), "lengths": np.array(lengths, "<i8")}
    if logprobs is not None:
        arrays["logprobs"] = np.array(logprobs, "<f8")
    tensor_file.write(tmp_path / "p", arrays, metadata)
    with pytest.raises(CheckpointError):
        Probe.read(tmp_path / "p")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_probe_is_refused_or_still_one(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "p"
        PROBE.write(path)
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        try:
            Probe.read(path)
        except CheckpointError as error:
            assert error.status == 422


@pytest.mark.failure_mode("F28")
@pytest.mark.parametrize(
    ("scores", "passed", "difference", "where"),
    [
        ([[-1.0, -2.0], [-3.0]], True, 0.0, None),
        ([[-1.0, -2.5], [-3.0]], True, 0.5, None),
        ([[-1.0, -2.0], [-3.75]], False, 0.75, "token 1 of sequence 1"),
        ([[-1.0, NAN], [-3.0]], False, INF, "token 2 of sequence 0"),
        ([[-INF, -2.0], [-3.0]], False, INF, "token 1 of sequence 0"),
        ([[None, -2.0], [-3.0]], False, INF, "token 1 of sequence 0"),
        ([[-1.0, -2.0]], False, INF, "per sequence"),
        ([[-1.0], [-3.0]], False, INF, "per sequence"),
        ([[-1.0, -2.0], [-3.0], []], False, INF, "per sequence"),
        ([], False, INF, "per sequence"),
    ],
)
def test_scores_are_compared(
    scores: Scores, passed: bool, difference: float, where: str | None
) -> None:
    verdict = compare(PROBE.logprobs, scores, PROBE.tolerance or 0.0)
    assert (verdict.passed, verdict.max_difference) == (passed, difference)
    assert verdict.where is None if where is None else where in str(verdict.where)


@given(st.integers(1, 300_000), st.integers(2, 5000))
def test_the_built_in_sequences_fit_any_model(vocab_size: int, max_len: int) -> None:
    sequences = builtin(vocab_size, max_len)
    assert sequences == builtin(vocab_size, max_len)
    assert all(2 <= len(ids) <= max_len for ids in sequences)
    assert all(0 <= token < vocab_size for ids in sequences for token in ids)


def test_the_built_in_sequences_cover_the_vocabulary_and_chunks_of_keys() -> None:
    sequences = builtin(512, 4096)
    ids = [token for sequence in sequences for token in sequence]
    assert len(set(ids)) > 0.8 * 512
    assert {token // 4 for token in ids} == set(range(128))
    assert max(map(len, sequences)) > 128
    assert sum(map(len, sequences)) < 500
    wide = [token for sequence in builtin(151_936, 4096) for token in sequence]
    assert len(set(wide)) == len(wide)


@pytest.mark.parametrize(("vocab_size", "max_len"), [(0, 10), (10, 1)])
def test_a_model_without_room_for_a_probe_is_refused(vocab_size: int, max_len: int) -> None:
    with pytest.raises(BadRequest, match=r"expected|needs"):
        builtin(vocab_size, max_len)
