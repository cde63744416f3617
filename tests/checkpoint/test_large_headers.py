"""Large headers of safetensors files: bounded, and read without holding the event loop."""

from __future__ import annotations

import gc
import json
import struct
import threading
from pathlib import Path
from time import process_time, sleep

import pytest

from lockstep.checkpoint.safetensors_file import MOST_TENSORS, TensorFile
from lockstep.tokens.errors import CheckpointError

HELD = 0.1
"""CPU seconds of the process in which no other thread runs; `json.loads` alone takes 0.4."""


def write_header(path: Path, header: str, data: int = 0) -> Path:
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


def file_of(path: Path, tensors: int) -> Path:
    header = {
        f"model.layers.{at % 60}.mlp.experts.{at}.down_proj.weight": {
            "dtype": "U8",
            "shape": [1],
            "data_offsets": [at, at + 1],
        }
        for at in range(tensors)
    }
    return write_header(path / f"{tensors}.safetensors", json.dumps(header), tensors)


def test_a_header_with_too_many_tensors_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"more than {MOST_TENSORS} tensors"):
        TensorFile.read(file_of(tmp_path, MOST_TENSORS + 1))


def test_reading_the_largest_header_lets_other_threads_run(tmp_path: Path) -> None:
    path, read = file_of(tmp_path, MOST_TENSORS), []
    thread = threading.Thread(target=lambda: read.append(TensorFile.read(path)))
    # A full collection of this process's objects is not what is measured.
    gc.disable()
    try:
        thread.start()
        longest, before = 0.0, process_time()
        while thread.is_alive():
            sleep(0.001)
            now = process_time()
            longest, before = max(longest, now - before), now
    finally:
        gc.enable()
    assert len(read[0].entries) == MOST_TENSORS
    assert longest < HELD


ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize("header", [
    f'{{"a":{ENTRY},"a":{ENTRY}}}',
    f'{{"a":{ENTRY},}}',
    f'{{"a":{ENTRY}}}}}',
    f'{{"a":{ENTRY}',
    f'{{"a" {ENTRY}}}',
    f'{{"a":{ENTRY} "b":{ENTRY}}}',
    f'{{1:{ENTRY}}}',
    '{"__metadata__":{},"__metadata__":{}}',
    '{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "[]",
    "",
])  # fmt: skip
def test_a_header_that_is_no_object_with_unique_names_is_rejected(
    tmp_path: Path, header: str
) -> None:
    with pytest.raises(CheckpointError, match=r"sound JSON|is twice"):
        TensorFile.read(write_header(tmp_path / "x.safetensors", header, 1))


@pytest.mark.parametrize(
    "header",
    ["{}", f'{{"a":{ENTRY}}}', f' {{ "a" :\n{ENTRY} , "b" : {ENTRY.replace("0,1", "1,2")}\t}}  '],
)
def test_white_space_between_the_parts_of_a_header_is_accepted(tmp_path: Path, header: str) -> None:
    names = [entry.name for entry in TensorFile.read(
        write_header(tmp_path / "x.safetensors", header, header.count("U8"))
    ).entries]  # fmt: skip
    assert names == ["a", "b"][: len(names)]
    assert len(names) == header.count("U8")
