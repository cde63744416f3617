"""Checkpoints come from a real S3 server whole and checked, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lockstep.backends.vllm.extension.source import Sources
from lockstep.checkpoint.delta.record import read_link
from lockstep.checkpoint.manifest import MANIFEST, STABLE, Manifest
from lockstep.checkpoint.stores import download as downloads
from lockstep.checkpoint.stores import object_store
from lockstep.checkpoint.stores.cache import HostCache
from lockstep.checkpoint.stores.fetch import local_checkpoint
from lockstep.checkpoint.stores.object_store import ObjectStore
from lockstep.checkpoint.stores.upload_checkpoint import upload
from lockstep.checkpoint.stores.url import AllowedRoots, StoreUrl
from lockstep.checkpoint.validate import Checkpoint
from lockstep.protocol.control.worker import Stage
from lockstep.tokens.errors import (
    BadRequest,
    CheckpointError,
    Conflict,
    Forbidden,
    LockstepError,
    Unavailable,
)
from tests.checkpoint.delta.deltas_on_disk import Arrays, chain, full, moved, same
from tests.checkpoint.weights_on_disk import tensors
from tests.stores.s3_server import BUCKET, SECRET, S3Server

BIG = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RETRIES", 3)
    monkeypatch.setattr(object_store, "REQUEST_SECONDS", 30)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 60)
    monkeypatch.setattr(downloads, "PIECE", 1 << 16)


@pytest.fixture
def prefix(s3: S3Server, tmp_path: Path) -> str:
    """A prefix of its own for each test."""
    return tmp_path.name


def large(seed: int = 0) -> Arrays:
    """A model whose file has a dozen pieces."""
    rng = np.random.default_rng(seed)
    return {**tensors(seed), BIG: rng.standard_normal((4096, 48)).astype("<f4")}


def published(s3: S3Server, prefix: str, directory: Path, arrays: Arrays | None = None) -> str:
    path = full(directory / "made" / "step-1", arrays if arrays is not None else large())
    url = s3.url(f"{prefix}/step-1")
    upload(path, url)
    s3.forget()
    return url


def weights_file(s3: S3Server, prefix: str) -> Path:
    return s3.file(f"{prefix}/step-1/model.safetensors")


def test_a_checkpoint_arrives_as_it_was_written_and_is_downloaded_once(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    arrays = large()
    url = published(s3, prefix, tmp_path, arrays)
    with local_checkpoint(url) as local:
        assert local.directory.name == "step-1"
        assert same(local.directory, arrays)
        assert local.nbytes == local.total > arrays[BIG].nbytes
        assert Checkpoint.validate(local.directory, verify_hashes=True)
    ranges = s3.count("GET")
    assert ranges > 10
    with local_checkpoint(url) as local:
        assert same(local.directory, arrays)
        assert local.nbytes == 0
    assert s3.count("GET") == ranges + 1  # only the manifest, which says that nothing changed


def test_processes_of_a_host_share_one_download(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    arrays = large()
    url = published(s3, prefix, tmp_path, arrays)

    def fetch(_: int) -> tuple[int, bool]:
        with local_checkpoint(url) as local:
            return local.nbytes, same(local.directory, arrays)

    with ThreadPoolExecutor(4) as threads:
        fetched = list(threads.map(fetch, range(4)))
    assert all(right for _, right in fetched)
    total = sum(path.stat().st_size for path in s3.file(f"{prefix}/step-1").iterdir())
    assert sum(nbytes for nbytes, _ in fetched) < total
    assert s3.sent < total + 4 * 10_000  # the manifests


@pytest.mark.parametrize("kind", ["cut", "503"])
def test_requests_that_fail_are_sent_again(
    s3: S3Server, prefix: str, tmp_path: Path, kind: str
) -> None:
    arrays = large()
    url = published(s3, prefix, tmp_path, arrays)
    s3.fail("model.safetensors", kind, count=3)  # type: ignore[arg-type]
    with local_checkpoint(url) as local:
        assert same(local.directory, arrays)


def test_an_interrupted_download_continues(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    arrays = large()
    url = published(s3, prefix, tmp_path, arrays)
    read, pieces = ObjectStore.read, 0

    def fails_later(self: ObjectStore, key: str, start: int, end: int) -> memoryview:
        nonlocal pieces
        pieces += key.endswith("model.safetensors")
        if pieces > 6:
            raise Unavailable("the process is about to end")
        return read(self, key, start, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "read", fails_later)
        with pytest.raises(Unavailable), local_checkpoint(url):
            pass
    sent = s3.sent
    assert sent > 4 << 16
    with local_checkpoint(url) as local:
        assert same(local.directory, arrays)
    size = weights_file(s3, prefix).stat().st_size
    assert s3.sent - sent < size - (4 << 16)


KILLED = """
import sys
from lockstep.checkpoint.stores import download
from lockstep.checkpoint.stores.fetch import local_checkpoint
from lockstep.checkpoint.stores.object_store import ObjectStore

download.PIECE = 1 << 16
read = ObjectStore.read

def announce(self, key, start, end):
    if start > 6 << 16:
        sys.stdin.read()
    data = read(self, key, start, end)
    print(start, flush=True)
    return data

ObjectStore.read = announce
with local_checkpoint(sys.argv[1]):
    pass
"""


def test_a_killed_process_leaves_no_lock_and_its_pieces(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    arrays = large()
    url = published(s3, prefix, tmp_path, arrays)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(6):
        assert process.stdout.readline()
    process.kill()
    process.wait()
    sent = s3.sent
    with local_checkpoint(url) as local:
        assert same(local.directory, arrays)
    assert s3.sent - sent < weights_file(s3, prefix).stat().st_size - (3 << 16)


def test_ranks_of_vllm_read_what_is_in_a_store(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    """The part of the worker extension that reads weights, which needs no vLLM."""
    paths, contents = chain(tmp_path / "run", 2)
    for path in paths:
        upload(path, s3.url(f"{prefix}/{path.name}"))
    sources = Sources(0)
    url = s3.url(f"{prefix}/step-2")
    held = sources.read(Stage(model_path=url))
    assert held.tensors.keys() == contents[2].keys()
    for name, tensor in held.tensors.items():
        assert tensor.numpy().tobytes() == contents[2][name].tobytes()
    sources.roots = AllowedRoots.of([tmp_path])
    with pytest.raises(Forbidden, match="outside the allowed roots"):
        sources.read(Stage(model_path=url))


@pytest.mark.failure_mode("F88")
def test_a_truncated_object_is_refused_by_name(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    url = published(s3, prefix, tmp_path)
    path = weights_file(s3, prefix)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"s3://weights/.*model\.safetensors has \d+ bytes"):
        with local_checkpoint(url):
            pass
    assert not list((tmp_path / "cache" / "views").iterdir())


@pytest.mark.failure_mode("F88")
def test_a_swapped_object_is_refused_by_its_digest(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    url = published(s3, prefix, tmp_path)
    path = weights_file(s3, prefix)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has SHA-256"):
        with local_checkpoint(url):
            pass
    assert not list((tmp_path / "cache" / "views").iterdir())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with local_checkpoint(url) as local:  # nothing of the wrong object is left
        assert same(local.directory, large())


@pytest.mark.failure_mode("F88")
def test_a_half_written_upload_is_refused_and_can_be_repeated(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    path = full(tmp_path / "made" / "step-1", large())
    url = s3.url(f"{prefix}/step-1")
    s3.fail("PUT", "403", count=1000)
    with pytest.raises(CheckpointError, match=r"refused access \(403, ExpiredToken\)"):
        upload(path, url)
    s3.forget()
    stored = s3.file(f"{prefix}/step-1")
    stored.mkdir(parents=True)
    for name in ("model.safetensors", MANIFEST):
        shutil.copyfile(path / name, stored / name)
        with pytest.raises(CheckpointError, match="its upload has not finished"):
            with local_checkpoint(url):
                pass
    assert upload(path, url).nbytes > 0
    assert upload(path, url).nbytes == 0
    with local_checkpoint(url) as local:
        assert same(local.directory, large())
    with pytest.raises(Conflict, match="another checkpoint already"):
        upload(full(tmp_path / "other" / "step-1", large(1)), url)


def test_an_upload_without_stable_comes_last(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    published(s3, prefix, tmp_path)
    s3.requests.clear()
    upload(full(tmp_path / "b" / "step-2", large(2)), s3.url(f"{prefix}/step-2"))
    puts = [line.split()[1] for line in s3.requests if line.startswith("PUT")]
    assert puts[-2].endswith(MANIFEST)
    assert puts[-1].endswith(STABLE)


def test_a_chain_arrives_and_a_delta_alone_for_the_weights_it_changes(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    paths, contents = chain(tmp_path / "run", 3)
    for path in paths:
        upload(path, s3.url(f"{prefix}/{path.name}"))
    s3.forget()
    live = read_link(paths[3])
    assert live is not None
    with local_checkpoint(s3.url(f"{prefix}/step-3"), live=live.record.base.digest) as local:
        assert not local.is_complete
        assert [path.name for path in local.root.iterdir()] == ["step-3"]
    assert s3.count("step-0/model") == 0
    with local_checkpoint(s3.url(f"{prefix}/step-3")) as local:
        assert local.is_complete
        assert same(local.directory, contents[3])
        names = sorted(path.name for path in local.root.iterdir())
        assert names == ["step-0", "step-1", "step-2", "step-3"]


@pytest.mark.failure_mode("F89")
def test_a_pruned_base_is_replaced_by_the_nearest_full_checkpoint_or_named(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    paths, contents = chain(tmp_path / "run", 3)
    for path in paths:
        upload(path, s3.url(f"{prefix}/{path.name}"))
    shutil.rmtree(s3.file(f"{prefix}/step-1"))
    with pytest.raises(CheckpointError, match=r"its link 'step-2' is based on 'step-1', but .*"):
        with local_checkpoint(s3.url(f"{prefix}/step-3")):
            pass
    upload(tmp_path / "run" / "full" / "step-2", s3.url(f"{prefix}/anchor-2"))
    with local_checkpoint(s3.url(f"{prefix}/step-3")) as local:
        assert same(local.directory, contents[3])
        assert sorted(path.name for path in local.root.iterdir()) == ["anchor-2", "step-3"]


@pytest.mark.failure_mode("F63")
def test_a_swapped_link_is_refused(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    paths, _ = chain(tmp_path / "run", 2)
    for path in paths:
        upload(path, s3.url(f"{prefix}/{path.name}"))
    other = full(tmp_path / "other" / "step-1", moved(tensors(), 9))
    shutil.rmtree(s3.file(f"{prefix}/step-1"))
    shutil.copytree(other, s3.file(f"{prefix}/step-1"))
    with pytest.raises(CheckpointError, match="it is not the base, or links were swapped"):
        with local_checkpoint(s3.url(f"{prefix}/step-2")):
            pass


def test_credentials_are_in_no_error(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = published(s3, prefix, tmp_path)
    s3.fail("GET", "403", count=1)
    with pytest.raises(CheckpointError) as refused, local_checkpoint(url):
        pass
    assert "refused access (403, ExpiredToken)" in refused.value.message
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET + "x")
    with pytest.raises(LockstepError) as wrong, local_checkpoint(url):
        pass
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable) as away, local_checkpoint(url):
        pass
    for error in (refused.value, wrong.value, away.value):
        assert error.__cause__ is None
        assert SECRET not in repr(error) + error.message
        assert url in error.message
    with pytest.raises(BadRequest) as named, local_checkpoint(f"s3://{SECRET}:x@bucket/step-1"):
        pass
    assert SECRET not in named.value.message


def test_a_bucket_that_is_removed_midway_is_an_error_that_names_the_object(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    url = published(s3, prefix, tmp_path)
    stream = ObjectStore.stream

    def remove_then(self: ObjectStore, key: str, piece: int):  # type: ignore[no-untyped-def]
        parts = list(stream(self, key, piece))
        shutil.rmtree(s3.file(prefix), ignore_errors=True)
        return iter(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "stream", remove_then)
        with pytest.raises(CheckpointError, match=rf"s3://{BUCKET}/{prefix}/step-1/.* does not"):
            with local_checkpoint(url):
                pass


def test_a_file_that_is_missing_is_an_error_that_names_it(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    """Also while larger files are being downloaded."""
    url = published(s3, prefix, tmp_path)
    s3.file(f"{prefix}/step-1/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-1/config\.json does not exist"):
        with local_checkpoint(url):
            pass
    assert not list((tmp_path / "cache" / "views").iterdir())


def test_a_claimed_size_is_checked_before_anything_is_downloaded(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    url = published(s3, prefix, tmp_path)
    with pytest.raises(CheckpointError, match="bytes more than the 100000 that"):
        with local_checkpoint(url, cache=HostCache(tmp_path / "small", 100_000)):
            pass
    assert s3.count("GET") == 1


def test_the_least_recently_used_checkpoints_make_room(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    arrays = {step: large(step) for step in range(3)}
    for step in arrays:
        path = full(tmp_path / "made" / f"step-{step}", arrays[step])
        upload(path, s3.url(f"{prefix}/step-{step}"))
    cache = HostCache(tmp_path / "cache", int(2.5 * sum(a.nbytes for a in arrays[0].values())))

    def fetch(step: int) -> int:
        with local_checkpoint(s3.url(f"{prefix}/step-{step}"), cache=cache) as local:
            assert same(local.directory, arrays[step])
            return local.nbytes

    assert all(fetch(step) for step in (0, 1))
    assert fetch(0) == 0
    assert fetch(2) > 0  # makes room: step-1 was not used for longest
    assert fetch(0) == 0
    with local_checkpoint(s3.url(f"{prefix}/step-0"), cache=cache) as held:
        fetch(1)
        assert same(held.directory, arrays[0])
        with pytest.raises(CheckpointError, match="LOCKSTEP_CHECKPOINT_CACHE_GB"):
            with local_checkpoint(s3.url(f"{prefix}/step-1"), cache=cache):
                fetch(2)


def test_a_cache_that_cannot_be_written_is_named(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = published(s3, prefix, tmp_path)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="LOCKSTEP_CHECKPOINT_CACHE names another"):
        with local_checkpoint(url):
            pass


def test_what_dead_processes_left_is_removed(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "views" / ".new-dead"
    left.mkdir(parents=True)
    (left / "step-1").mkdir()
    with local_checkpoint(published(s3, prefix, tmp_path)):
        assert not left.exists()


def test_a_server_without_ranges_is_read_in_one_piece(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = large()
    url = published(s3, prefix, tmp_path, arrays)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.upstream}")
    with local_checkpoint(url) as local:
        assert same(local.directory, arrays)


def test_a_manifest_cannot_write_outside_its_directory(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    url = published(s3, prefix, tmp_path)
    path = s3.file(f"{prefix}/step-1/{MANIFEST}")
    text = path.read_text()
    for name in ("../../escape", "..", ".writing", STABLE, "/etc/passwd"):
        path.write_text(text.replace('"config.json"', f'"{name}"'))
        with pytest.raises(CheckpointError, match=r"lists|not a file beside it"):
            with local_checkpoint(url):
                pass


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("s3://weights", "expected s3://weights/PREFIX"),
        ("s3://weights/run/../x", "without empty"),
        ("s3://weights/run?x=1", "with a user, a query or a fragment"),
        ("ftp://weights/run", "expected a path, or one of file://, s3://"),
        ("file://host/run", "expected file:///absolute/path"),
    ],
)
def test_a_reference_that_is_none_is_refused(reference: str, error: str) -> None:
    with pytest.raises(BadRequest, match=error), local_checkpoint(reference):
        pass


def test_only_allowed_prefixes_are_read(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    url = published(s3, prefix, tmp_path)
    path = full(tmp_path / "step-9", tensors())
    for roots in ([s3.url(prefix + "x")], ["s3://other/" + prefix], [str(tmp_path)]):
        with pytest.raises(Forbidden), local_checkpoint(url, AllowedRoots.of(roots)):
            pass
    with pytest.raises(Forbidden), local_checkpoint(str(path), AllowedRoots.of([s3.url(prefix)])):
        pass
    assert s3.requests == []
    roots = AllowedRoots.of([s3.url(prefix), tmp_path])
    for reference in (url, str(path), f"file://{path}"):
        with local_checkpoint(reference, roots) as local:
            assert local.directory.is_dir()


def test_a_view_is_as_complete_as_its_checkpoint(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    url = published(s3, prefix, tmp_path)
    with local_checkpoint(url) as local:
        manifest = Manifest.read(local.directory)
        assert manifest is not None
        manifest.check(local.directory, hashes=True)
        assert os.access(local.directory / STABLE, os.R_OK)
    assert StoreUrl.parse(url).parent.name == prefix
