"""A grammar that constrains a completion, with the fields of vLLM's `structured_outputs`."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
THOUGHT_END = "</think>"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on the text of a completion.

    `text` is a JSON schema (json), a regular expression (regex), a JSON list of strings (choice), a
    Lark grammar (grammar) or a structural tag as JSON (structural_tag); empty for json_object.
    """

    kind: GrammarKind
    text: str = ""

    @property
    def digest(self) -> str:
        """Digest of the grammar's text: equal texts have equal digests."""
        return sha256(f"{self.kind}\n{self.text}".encode()).hexdigest()[:16]

    @property
    def has_thought(self) -> bool:
        """Whether the grammar itself places the thinking, so that it applies from the first
        token.
        """
        return self.kind == "structural_tag" and THOUGHT_END in self.text
