"""Whatever changed in a tensor survives encoding and decoding bit for bit, in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.delta.encoding import changed_positions, decode, encode
from lockstep.checkpoint.reader import Bytes, TensorShape
from lockstep.checkpoint.safetensors_file import SIZES
from lockstep.tokens.errors import CheckpointError


def restored(old: Bytes, new: Bytes, dtype: str) -> tuple[str, Bytes]:
    encoded = encode(old, new, dtype)
    target = old.copy()
    if encoded.encoding != "same":
        tensor = TensorShape((len(new) // SIZES[dtype],), dtype)
        payload = memoryview(bytes(encoded.payload))
        decode(payload, tensor, encoded.encoding, encoded.changed, encoded.gap_bytes).apply(target)
    return encoded.encoding, target


@given(
    dtype=st.sampled_from(sorted(SIZES)),
    count=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_any_change_survives(dtype: str, count: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * SIZES[dtype], np.uint8)
    new = old.copy()
    hit = rng.random(len(new)) < share
    new[hit] = rng.integers(0, 256, int(hit.sum()), np.uint8)
    encoding, result = restored(old, new, dtype)
    assert result.tobytes() == new.tobytes()
    assert (encoding == "same") == (old.tobytes() == new.tobytes())


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_positions_are_those_of_changed_values(width: int) -> None:
    rng = np.random.default_rng(width)
    old = rng.integers(0, 4, 1000 * width + 3 * width, np.uint8)
    new = rng.integers(0, 4, len(old), np.uint8)
    word = f"u{width}"
    expected = np.flatnonzero(old.view(word) != new.view(word))
    assert changed_positions(old, new, width).tolist() == expected.tolist()


def test_the_smallest_encoding_wins() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal(100_000).astype("<f4").view(np.uint8)
    few, many = old.copy(), old.copy()
    few.view("<u4")[::500] ^= 1
    many.view("<u4")[:] ^= rng.integers(0, 4, 100_000, dtype=np.uint32)
    other = rng.integers(0, 256, len(old), np.uint8)
    assert restored(old, old.copy(), "F32")[0] == "same"
    assert restored(old, few, "F32")[0] == "sparse"
    assert restored(old, many, "F32")[0] == "xor"
    assert restored(old, other, "F32")[0] == "full"
    assert len(encode(old, few, "F32").payload) < 200 * 6
    assert len(encode(old, many, "F32").payload) < len(old) // 8


TENSOR = TensorShape((100,), "BF16")


def pack(data: bytes) -> memoryview:
    return memoryview(zstandard.compress(data))


@pytest.mark.parametrize(
    ("payload", "encoding", "changed", "problem"),
    [
        (pack(b"\0" * (1 << 20)), "xor", 100, "unpacks to 1048576 bytes, expected 200"),
        (pack(b"\0" * (1 << 20)), "sparse", 2, "unpacks to 1048576 bytes, expected 6"),
        (pack(b"\xff\xff" + b"\0" * 4), "sparse", 2, "beyond the 100 of the tensor"),
        (pack(b"\0" * 200)[:-4], "xor", 100, "not sound zstd"),
        (memoryview(b"nonsense"), "xor", 100, "not sound zstd"),
        (memoryview(b"\0" * 199), "full", 100, "has 199 bytes, expected 200"),
    ],
)
@pytest.mark.failure_mode("F63")
def test_a_hostile_payload_is_refused_by_its_claims(
    payload: memoryview, encoding: str, changed: int, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        decode(payload, TENSOR, encoding, changed, 1)  # type: ignore[arg-type]
