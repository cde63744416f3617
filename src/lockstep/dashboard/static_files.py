"""The static files of the dashboard, and those that a report embeds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files

INDEX = "index.html"
MEDIA_TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
SHARED_SCRIPTS = ("dom.js", "charts.js", "tokens.js")
"""Scripts that the report and the dashboard share, in the order of their imports."""
SHARED_STYLE = "shared.css"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A static file as it is sent."""

    data: bytes
    media_type: str
    etag: str


def read_static() -> dict[str, StaticFile]:
    """Return every file by its name."""
    by_name = {}
    for file in files("lockstep.dashboard").joinpath("static").iterdir():
        kind = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            etag = f'"{blake2b(data, digest_size=8).hexdigest()}"'
            by_name[file.name] = StaticFile(data, kind, etag)
    return by_name


def shared_script() -> str:
    """Return the shared modules as one script: a page opened from disk cannot import modules."""
    folder = files("lockstep.dashboard").joinpath("static")
    parts = [folder.joinpath(name).read_text("utf-8") for name in SHARED_SCRIPTS]
    joined = "\n".join(re.sub(r"^import .*\n", "", part, flags=re.M) for part in parts)
    return re.sub(r"^export ", "", joined, flags=re.M)


def shared_style() -> str:
    """Return the style sheet that the shared scripts need."""
    return files("lockstep.dashboard").joinpath("static", SHARED_STYLE).read_text("utf-8")
