"""Version labels: their grammar, and how a label names an adapter beside the weights.

A label of weights has 1 to 128 characters of A-Z a-z 0-9 and `_ . : = @ -`, starting with a letter,
a digit or `_`. A token sampled under an adapter carries `<weights>+<adapter>@<label of the
adapter's contents>`. `+` occurs in none of the three parts and `@` not in an adapter's name, so a
joined label is unambiguous.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.tokens.errors import BadRequest

MAX_LABEL = 128
_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_.:=@-]*"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:=/-]*"
LABEL = re.compile(_LABEL)
NAME = re.compile(_NAME)
WORKER_ID = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:=@/\[\]-]*")
"""Worker ids include host:port, also for IPv6."""
JOINED = re.compile(rf"(.+)\+({_NAME})@({_LABEL})", re.DOTALL)
"""Weights may have a foreign label of any form; the part after the last `+` may not."""
SHOWN = 40


@dataclass(frozen=True, slots=True)
class VersionLabel:
    """Parts of a label; `adapter` and `contents` are None for weights alone."""

    weights: str
    adapter: str | None = None
    contents: str | None = None

    @classmethod
    def parse(cls, label: str) -> VersionLabel:
        """Return the parts. A label that does not end with an adapter's name and contents is that
        of weights, whatever its form, because other servers may use any.
        """
        match = JOINED.fullmatch(label)
        return cls(label) if match is None else cls(*match.groups())

    def __str__(self) -> str:
        if self.adapter is None or self.contents is None:
            return self.weights
        return joined(self.weights, self.adapter, self.contents)


def joined(weights: str, adapter: str, contents: str) -> str:
    """Return the label of tokens sampled under an adapter."""
    return f"{weights}+{adapter}@{contents}"


def check_label(label: str, param: str = "weight_version") -> str:
    """Return the label. Raises BadRequest that names `param` if it is invalid."""
    return _checked(label, LABEL, "_.:=@-", param)


def check_adapter_name(name: str, param: str = "lora_name") -> str:
    """Return the name. Raises BadRequest that names `param` if it is invalid."""
    return _checked(name, NAME, "_.:=/-", param)


def check_worker_id(worker_id: str, param: str = "id") -> str:
    """Return the id. Raises BadRequest that names `param` if it is invalid."""
    return _checked(worker_id, WORKER_ID, "_.:=@/[]-", param)


def _checked(text: str, grammar: re.Pattern[str], marks: str, param: str) -> str:
    if len(text) <= MAX_LABEL and grammar.fullmatch(text):
        return text
    # Escaped and truncated: the invalid part may be what would break a terminal or a log.
    excerpt = ascii(text if len(text) <= SHOWN else text[:SHOWN]) + "..." * (len(text) > SHOWN)
    raise BadRequest(
        f"{param} is {excerpt} ({len(text)} characters): expected 1 to {MAX_LABEL} of A-Z a-z 0-9 "
        f"and {' '.join(marks)}, beginning with a letter, a digit or _",
        param=param,
    )
