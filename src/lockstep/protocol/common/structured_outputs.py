"""Structured output in request bodies: vLLM's field, its older guided fields, OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.grammar import Grammar, GrammarKind

FIELD = "structured_outputs"
KINDS: tuple[GrammarKind, ...] = (
    "json", "json_object", "regex", "choice", "grammar", "structural_tag",
)  # fmt: skip
GUIDED: Mapping[str, GrammarKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
GRAMMAR_FIELDS = (FIELD, *GUIDED)
"""Fields of every body that may demand a grammar; chat and completions have response_format too."""


class StructuredOutputs(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """vLLM's `structured_outputs`: one kind of grammar. The last block is refused if it is set."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None

    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    @classmethod
    def of(cls, grammar: Grammar) -> StructuredOutputs:
        """The field for a grammar."""
        values: dict[GrammarKind, Any] = {
            "json_object": True,
            "choice": msgspec.json.decode(grammar.text) if grammar.kind == "choice" else None,
        }
        return cls(**{grammar.kind: values.get(grammar.kind, grammar.text)})


def read_grammar(body: Any, prefix: str = "") -> Grammar | None:
    """The grammar that a body demands, in whatever field; None for free text.

    `prefix` is where the fields stand, for errors. Raises BadRequest when there are several, or
    when one makes no sense, and UnsupportedField for options that would be ignored.
    """
    grammars: dict[str, Grammar] = {}
    if (outputs := body.structured_outputs) is not None:
        _refuse_options(outputs, prefix)
        for kind in KINDS:
            value = getattr(outputs, kind)
            if value is not None and value is not False:
                grammars[f"{prefix}{FIELD}.{kind}"] = _grammar(
                    kind, value, f"{prefix}{FIELD}.{kind}"
                )
        if not grammars:
            raise BadRequest(
                f"{prefix}{FIELD} names no grammar: expected one of {', '.join(KINDS)}",
                param=f"{prefix}{FIELD}",
            )
    for field, kind in GUIDED.items():
        if (value := getattr(body, field)) is not None:
            grammars[f"{prefix}{field}"] = _grammar(kind, value, f"{prefix}{field}")
    chosen = getattr(body, "response_format", None)
    if chosen is not None and (grammar := _response_format(chosen)) is not None:
        grammars["response_format"] = grammar
    if len(grammars) > 1:
        raise BadRequest(
            f"a completion cannot be held to several grammars: {', '.join(grammars)}; send one",
            param=next(iter(grammars)),
        )
    return next(iter(grammars.values()), None)


def _refuse_options(outputs: StructuredOutputs, prefix: str) -> None:
    for field in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(outputs, field):
            raise UnsupportedField(
                f"{prefix}{FIELD}.{field} is not supported by this engine: leave it out",
                param=f"{prefix}{FIELD}.{field}",
            )


def _grammar(kind: GrammarKind, value: Any, field: str) -> Grammar:
    if kind == "json_object":
        return Grammar(kind)
    if kind == "choice":
        if not value or not all(isinstance(choice, str) and choice for choice in value):
            raise BadRequest(f"{field} is {value!r}: expected strings, none empty", param=field)
        return Grammar(kind, msgspec.json.encode(value).decode())
    if not isinstance(value, str):
        if kind not in ("json", "structural_tag") or not isinstance(value, dict | bool):
            raise BadRequest(f"{field} is {value!r}: expected text", param=field)
        return Grammar(kind, msgspec.json.encode(value).decode())
    return Grammar(kind, value)


def _response_format(value: dict[str, Any]) -> Grammar | None:
    """OpenAI's `response_format` as a grammar; None for text."""
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            described = value.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise BadRequest(
                    "response_format.json_schema has no schema: expected an object with `schema`",
                    param="response_format.json_schema",
                )
            return Grammar("json", msgspec.json.encode(schema).decode())
        case "structural_tag":
            return Grammar("structural_tag", msgspec.json.encode(value).decode())
    raise UnsupportedField(
        f"response_format.type is {value.get('type')!r}: expected text, json_object, json_schema "
        "or structural_tag",
        param="response_format.type",
    )
