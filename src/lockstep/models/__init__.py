"""The tiny models that ship with the package, found by name."""

from __future__ import annotations

from pathlib import Path

BUNDLED: tuple[str, ...] = ("tiny", "tiny-moe")


def bundled(name: str) -> Path | None:
    """Return the directory of the bundled model `name`, or None if no such model is bundled.

    The directory holds weights, tokenizer and model card in the Hugging Face layout.
    """
    return Path(__file__).parent / name if name in BUNDLED else None


def model_directory(name: str | Path) -> Path:
    """The directory that a user means by a model: a bundled one by its name, else that path.

    It need not exist.
    """
    return bundled(str(name)) or Path(name)
