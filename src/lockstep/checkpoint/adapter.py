"""Validation of LoRA adapters by their settings and the header of their tensor file.

Adapters get the checks that checkpoints get before anything large is read: files inside the allowed
roots, regular, complete, of known dtypes and plausible shapes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.files import file_size, read_object
from lockstep.checkpoint.safetensors_file import TensorEntry, TensorFile
from lockstep.checkpoint.sources import check_links
from lockstep.tokens.errors import AdapterError, CheckpointError

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
LARGEST_SETTINGS = 1 << 20
"""Maximum size of adapter_config.json in bytes; usual ones have 1 KB."""
LONGEST_NAME = 512
"""Maximum length of a tensor's name in characters."""
LARGEST_SIZE = 1 << 20
"""Maximum size of a dimension. The largest vocabularies have 300,000 entries."""
FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields of config.json in which two models of one architecture must agree."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The settings of an adapter, and the header of its tensors."""

    path: Path
    settings: Mapping[str, Any]
    file: TensorFile

    @classmethod
    def read(cls, path: Path, roots: Sequence[Path] | None = None) -> AdapterFiles:
        """Check the adapter in `path`; `roots` None allows symlinks to any place.

        Raises AdapterError with the reason, and Forbidden for a symlink out of `roots`. Blocks on
        files: asynchronous callers use a thread.
        """
        try:
            if roots is not None:
                check_links(path, os.listdir(path), roots)
            return cls(path, _read_settings(path / SETTINGS), _read_header(path / WEIGHTS))
        except OSError as error:
            raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
        except CheckpointError as error:
            raise AdapterError(error.message) from None

    def check_modules(self) -> None:
        """Raise AdapterError unless each module of `target_modules`, and no other, has both of its
        factors."""
        factors: dict[str, dict[str, TensorEntry]] = {}
        for entry in self.file.entries:
            if match := FACTOR.fullmatch(entry.name):
                factors.setdefault(match[1], {})[match[2]] = entry
        for module, pair in factors.items():
            a, b = pair.get("A"), pair.get("B")
            if a is None or b is None:
                raise AdapterError(f"lora_{'B' if a else 'A'} of {module!r} is missing")
            if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
                raise AdapterError(
                    f"lora_A of {module!r} has shape {a.shape}, and lora_B has {b.shape}: "
                    "expected (rank, in) and (out, rank)"
                )
        self._check_targets(factors)

    def _check_targets(self, factors: Mapping[str, object]) -> None:
        targets = self.settings.get("target_modules")
        # A pattern (a string) is not evaluated: a regular expression can run for hours.
        if not isinstance(targets, list):
            return
        unused = {target for target in targets if isinstance(target, str)}
        if len(unused) != len(targets):
            raise AdapterError(f"{SETTINGS} has target_modules that are not distinct names")
        names = frozenset(unused)
        for module in factors:
            parts = module.split(".")
            matched = {".".join(parts[at:]) for at in range(len(parts))} & names
            if not matched:
                raise AdapterError(
                    f"the adapter updates {module!r}, which is not one of its target_modules "
                    f"({', '.join(sorted(names))[:200]})"
                )
            unused -= matched
        if factors and unused:
            raise AdapterError(
                f"{SETTINGS} has target_modules without tensors: {', '.join(sorted(unused))[:200]}"
            )

    def check_base(self, served: Sequence[str], *, has_probe: bool) -> str | None:
        """Compare the base that the adapter was trained on with the names of the served model.

        Raises AdapterError for a base that is another model: another architecture, or another
        repository of the Hub. In the latter case a probe beside the adapter decides instead.
        Returns a warning where the names differ but may mean the same weights.
        """
        base = self.settings.get("base_model_name_or_path")
        if not isinstance(base, str) or not base or not served:
            return None
        name, names = _model_name(base), [_model_name(other) for other in served]
        if any(other.rpartition("/")[2] == name.rpartition("/")[2] for other in names):
            return None
        for other in served:
            if difference := _config_difference(Path(base), Path(other)):
                raise AdapterError(
                    f"the adapter was trained on {base[:200]!r}, which is another model than the "
                    f"served {other!r}: {difference}"
                )
        listed = ", ".join(map(repr, served))
        if not has_probe and _is_repository(name) and any(map(_is_repository, names)):
            raise AdapterError(
                f"the adapter was trained on {base[:200]!r}, and {listed} is served: serve that "
                "base, or write a probe beside the adapter, which proves that they are the same"
            )
        return f"{SETTINGS} names the base {base[:200]!r}, and {listed} is served: " + (
            "the probe decides" if has_probe else "without a probe nothing compares the two"
        )


def _read_settings(path: Path) -> dict[str, Any]:
    if file_size(path) > LARGEST_SETTINGS:
        raise AdapterError(f"{path} has more than {LARGEST_SETTINGS} bytes")
    settings = read_object(path)
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{path} has peft_type {kind!r:.40}, expected 'LORA'")
    return settings


def _read_header(path: Path) -> TensorFile:
    file = TensorFile.read(path)
    if not file.entries:
        raise AdapterError(f"{path} holds no LoRA tensors")
    for entry in file.entries:
        _check_entry(entry)
    return file


def _check_entry(entry: TensorEntry) -> None:
    if len(entry.name) > LONGEST_NAME:
        raise AdapterError(
            f"an adapter tensor has a name of {len(entry.name)} characters, which starts with "
            f"{entry.name[:40]!r}: expected {LONGEST_NAME} at most"
        )
    if entry.dtype not in FLOATS:
        raise AdapterError(
            f"adapter tensor {entry.name!r} is {entry.dtype}, expected one of {', '.join(FLOATS)}"
        )
    if not 1 <= len(entry.shape) <= 3 or not all(1 <= size <= LARGEST_SIZE for size in entry.shape):
        raise AdapterError(
            f"adapter tensor {entry.name!r} has shape {str(list(entry.shape[:4]))[:80]} "
            f"({len(entry.shape)} dimensions): expected 1 to 3 sizes of 1 to {LARGEST_SIZE}"
        )


def _model_name(name: str) -> str:
    """Return the repository of a snapshot in the Hub's cache, and any other name as it is."""
    if match := SNAPSHOT.search(name + "/"):
        return f"{match[1]}/{match[2]}"
    return name.rstrip("/")


def _is_repository(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", "."))


def _config_difference(base: Path, served: Path) -> str | None:
    """Return the first field in which the two models' config.json differ, where both are here."""
    if not (base.is_absolute() and served.is_absolute()):
        return None
    try:
        trained, running = (read_object(path / "config.json") for path in (base, served))
    except CheckpointError:
        return None
    for field in SIZES:
        if trained.get(field) != running.get(field):
            return f"{field} is {trained.get(field)!r:.40}, served is {running.get(field)!r:.40}"
    return None
