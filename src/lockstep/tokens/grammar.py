"""A grammar that holds a completion to a form, in the words of vLLM's `structured_outputs`."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
THOUGHT_END = "</think>"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion must look like.

    `text` is a JSON schema (json), a regular expression (regex), a JSON list of strings (choice), a
    Lark grammar (grammar) or a structural tag as JSON (structural_tag); empty for json_object.
    """

    kind: GrammarKind
    text: str = ""

    @property
    def digest(self) -> str:
        """Names this grammar: two that are written the same have the same."""
        return sha256(f"{self.kind}\n{self.text}".encode()).hexdigest()[:16]

    @property
    def has_thought(self) -> bool:
        """Whether it says itself where a thought goes, so that it holds from the first token."""
        return self.kind == "structural_tag" and THOUGHT_END in self.text
