"""Structured output in request bodies: vLLM's field, its older guided fields, OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.grammar import Grammar, GrammarKind

FIELD = "structured_outputs"
COMPILER_OPTIONS = "x-guidance"
"""Key of a JSON schema for llguidance's own options."""
Json = dict[str, Any]
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
    """vLLM's `structured_outputs`: one kind of grammar, and the whitespace of JSON."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None

    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None

    @classmethod
    def of(cls, grammar: Grammar) -> StructuredOutputs:
        """The field for a grammar."""
        values: dict[GrammarKind, Any] = {
            "json_object": True,
            "choice": msgspec.json.decode(grammar.text) if grammar.kind == "choice" else None,
        }
        return cls(**{grammar.kind: values.get(grammar.kind, grammar.text)})

    @property
    def whitespace(self) -> Json | None:
        """Options of llguidance for the whitespace in JSON; None for its default."""
        if self.whitespace_pattern is not None:
            return {"whitespace_flexible": True, "whitespace_pattern": self.whitespace_pattern}
        return {"whitespace_flexible": False} if self.disable_any_whitespace else None


def read_grammar(body: Any, prefix: str = "") -> Grammar | None:
    """The grammar that a body demands, in whatever field; None for free text.

    `prefix` is the path of the fields, for errors. Raises BadRequest for several grammars or an
    invalid one, and UnsupportedField for options that would be ignored.
    """
    grammars: dict[str, Grammar] = {}
    if (outputs := body.structured_outputs) is not None:
        _check_options(outputs, prefix)
        for kind in KINDS:
            value = getattr(outputs, kind)
            if value is not None and value is not False:
                field = f"{prefix}{FIELD}.{kind}"
                grammars[field] = _spaced(_grammar(kind, value, field), outputs, field)
        # Tool calls take the whitespace as well.
        if not grammars and not (outputs.whitespace and getattr(body, "tools", None)):
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


def with_whitespace(schema: Json, whitespace: Json | None) -> Json:
    """Return a JSON schema with these options for the whitespace; see `StructuredOutputs`."""
    return {**schema, COMPILER_OPTIONS: whitespace} if whitespace else schema


def _spaced(grammar: Grammar, outputs: StructuredOutputs, field: str) -> Grammar:
    """Return the grammar with the whitespace that the body sets, if it does."""
    if (whitespace := outputs.whitespace) is None:
        return grammar
    if grammar.kind not in ("json", "json_object"):
        raise BadRequest(
            f"disable_any_whitespace and whitespace_pattern are of JSON: {field} has none",
            param=field,
        )
    try:
        schema = msgspec.json.decode(grammar.text or b'{"type": "object"}', type=Json)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{field} is no JSON object: {error}", param=field) from None
    return Grammar("json", msgspec.json.encode(with_whitespace(schema, whitespace)).decode())


def _check_options(outputs: StructuredOutputs, prefix: str) -> None:
    if outputs.disable_additional_properties:
        raise UnsupportedField(
            f"{prefix}{FIELD}.disable_additional_properties is not supported by this engine: set "
            "additionalProperties in the schema",
            param=f"{prefix}{FIELD}.disable_additional_properties",
        )
    if outputs.disable_any_whitespace and outputs.whitespace_pattern is not None:
        raise BadRequest(
            f"{prefix}{FIELD}: disable_any_whitespace and whitespace_pattern exclude each other",
            param=f"{prefix}{FIELD}.whitespace_pattern",
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
