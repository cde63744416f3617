"""URLs of checkpoints in object stores, and the directories and prefixes that are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lockstep.checkpoint.sources import inside
from lockstep.tokens.errors import BadRequest

SCHEMES = ("s3", "gs", "az")
"""Schemes of stores. `file` is a directory."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A prefix of an object store; `key` is empty for a whole bucket. It holds no credentials."""

    scheme: str
    bucket: str
    key: str = ""

    @classmethod
    def parse(cls, text: str, field: str = "weight_dir") -> StoreUrl:
        """Return the parsed URL. Raises BadRequest, without quoting a URL that has credentials."""
        parts = urlsplit(text)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise BadRequest(
                f"{field} is a {parts.scheme}:// URL with a user, a query or a fragment: name only "
                "bucket and prefix; credentials come from the environment of the process",
                param=field,
            )
        key = parts.path.strip("/")
        if not parts.netloc or ":" in parts.netloc or not _is_sound(key):
            raise BadRequest(
                f"{field} is {text!r}: expected {parts.scheme}://BUCKET/PREFIX without empty, '.' "
                "and '..' parts",
                param=field,
            )
        return cls(parts.scheme, parts.netloc, key)

    @property
    def name(self) -> str:
        """The last part, which is the directory's name."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StoreUrl:
        return StoreUrl(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def child(self, name: str) -> StoreUrl:
        return StoreUrl(self.scheme, self.bucket, f"{self.key}/{name}" if self.key else name)

    def is_inside(self, prefix: StoreUrl) -> bool:
        """Return whether this is the prefix or below it."""
        same = (self.scheme, self.bucket) == (prefix.scheme, prefix.bucket)
        return same and f"{self.key}/".startswith(f"{prefix.key}/" if prefix.key else "")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


Location = Path | StoreUrl
"""Where a checkpoint is: a directory that this host can read, or a prefix of a store."""


@dataclass(frozen=True, slots=True)
class AllowedRoots:
    """Directories and prefixes of stores that weights may come from; None: any."""

    directories: tuple[Path, ...] | None = None
    prefixes: tuple[StoreUrl, ...] | None = None

    @classmethod
    def of(cls, roots: Iterable[str | Path]) -> AllowedRoots:
        """Return the allowed roots. None are given: all are allowed, also of stores."""
        locations = [location(str(root), "checkpoint_root") for root in roots]
        if not locations:
            return cls()
        return cls(
            tuple(root for root in locations if isinstance(root, Path)),
            tuple(root for root in locations if isinstance(root, StoreUrl)),
        )

    def contain(self, reference: str) -> bool:
        """Return whether a path or URL is inside one of them."""
        where = location(reference)
        if isinstance(where, StoreUrl):
            return self.prefixes is None or any(map(where.is_inside, self.prefixes))
        return self.directories is None or inside(where.resolve(), self.directories)


def is_url(text: str) -> bool:
    """Return whether a reference is a URL, of a store or of a file."""
    return "://" in text


def location(text: str, field: str = "weight_dir") -> Location:
    """Return what a path, `file://` URL or URL of a store refers to. Raises BadRequest."""
    if not is_url(text):
        return Path(text)
    scheme = text.partition("://")[0].lower()
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise BadRequest(f"{field} is {text!r}: expected file:///absolute/path", param=field)
        return Path(unquote(parts.path))
    if scheme not in SCHEMES:
        expected = ", ".join(f"{name}://" for name in ("file", *SCHEMES))
        raise BadRequest(
            f"{field} is a {scheme[:20]}:// URL: expected a path, or one of {expected}", param=field
        )
    return StoreUrl.parse(text, field)


def _is_sound(key: str) -> bool:
    if not key:
        return True
    parts = key.split("/")
    return key.isprintable() and not any(part in ("", ".", "..") for part in parts)
