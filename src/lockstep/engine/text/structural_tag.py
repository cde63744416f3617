"""Structural tags, which vLLM and SGLang accept for tool calls, as a grammar for `llguidance`.

Supports the formats json_schema, const_string, regex, any_text, sequence, or, tag,
tags_with_separator and triggered_tags of a `{"type": "structural_tag", "format": ...}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.engine.text.grammar_server import JSON_OPTIONS
from lockstep.tokens.errors import BadRequest

TEXT = r"/(.|\n)*/"


class TagGrammar:
    """Builder of the rules of one structural tag. `added` maps texts of added tokens to ids.

    Where a literal contains such a text, exactly that token is required. Its letters as ordinary
    tokens would read the same, but a parser that looks for the token would not find it.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        names = sorted(added, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def lark(self, text: str) -> str:
        """Return the grammar in Lark's notation. Raises BadRequest for an invalid tag."""
        try:
            tag = json.loads(text)
            start = self._rule(tag["format"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadRequest(
                f"structural_tag cannot be read ({error!r}): expected "
                '{"type": "structural_tag", "format": {...}}',
                param="structured_outputs.structural_tag",
            ) from None
        return "\n".join([f"start: {start}", *self._rules])

    def _rule(self, form: dict[str, Any]) -> str:
        """Return the expression of a format, adding rules where it needs them."""
        match form["type"]:
            case "const_string":
                return self._literal(form["value"])
            case "json_schema":
                schema = {} if form["json_schema"] is True else form["json_schema"]
                if isinstance(schema, dict):
                    schema = {"x-guidance": JSON_OPTIONS, **schema}
                return f"%json {json.dumps(schema)}"
            case "regex":
                return self._add_rule(_regex(form["pattern"]), terminal=True)
            case "any_text":
                return self._add_rule(TEXT, terminal=True)
            case "sequence":
                return self._add_rule(" ".join(map(self._rule, form["elements"])))
            case "or":
                return self._add_rule(" | ".join(map(self._rule, form["elements"])))
            case "tag":
                return self._tag(form)
            case "tags_with_separator":
                return self._separated(form)
            case "triggered_tags":
                return self._triggered(form)
        raise BadRequest(
            f"structural_tag has a format of type {form['type']!r}, which is not supported",
            param="structured_outputs.structural_tag",
        )

    def _tag(self, form: dict[str, Any]) -> str:
        if form["content"]["type"] == "any_text" and form["end"]:
            return self._add_rule(f"{self._literal(form['begin'])} {self._until(form['end'])}")
        parts = (self._literal(form["begin"]), self._rule(form["content"]))
        return self._add_rule(" ".join((*parts, self._literal(form["end"]))))

    def _separated(self, form: dict[str, Any]) -> str:
        any_tag = self._add_rule(" | ".join(map(self._tag, form["tags"])))
        if form.get("stop_after_first"):
            return any_tag if form.get("at_least_one") else f"({any_tag})?"
        rest = f"({self._literal(form['separator'])} {any_tag})*"
        several = self._add_rule(f"{any_tag} {rest}")
        return several if form.get("at_least_one") else f"({several})?"

    def _triggered(self, form: dict[str, Any]) -> str:
        """Return an expression for free text up to a trigger, which one of the tags must follow."""
        expressions = []
        for trigger in form["triggers"]:
            rests = [
                {**tag, "begin": tag["begin"][len(trigger) :]}
                for tag in form["tags"]
                if tag["begin"].startswith(trigger)
            ]
            tags = self._add_rule(" | ".join(map(self._tag, rests)))
            expressions.append(f"{self._until(trigger)} {tags}")
        calls = self._add_rule(" | ".join(expressions))
        free = self._add_rule(TEXT, terminal=True)
        if form.get("stop_after_first"):
            return self._add_rule(calls if form.get("at_least_one") else f"{calls} | {free}")
        repeated = f"{calls}+" if form.get("at_least_one") else f"{calls}*"
        return self._add_rule(f"{repeated} {free}")

    def _until(self, trigger: str) -> str:
        """Return an expression for free text up to the first occurrence of a trigger."""
        if self._names is not None and self._names.match(trigger):
            return f"{self._add_rule(TEXT, terminal=True)} {self._literal(trigger)}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {TEXT} {json.dumps(trigger)}")
        return name

    def _literal(self, text: str) -> str:
        """Return an expression for a text, in which added tokens stand for themselves."""
        if not text:
            return '""'
        parts: list[str] = []
        at = 0
        for name in self._names.finditer(text) if self._names is not None else ():
            parts += [json.dumps(text[at : name.start()])] * (name.start() > at)
            parts.append(f"<[{self._added[name.group()]}]>")
            at = name.end()
        parts += [json.dumps(text[at:])] * (len(text) > at)
        return " ".join(parts)

    def _add_rule(self, body: str, *, terminal: bool = False) -> str:
        """Add a rule and return its name. Lark tells terminals from rules by capital letters."""
        name = f"{'TEXT' if terminal else 'rule'}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _regex(pattern: str) -> str:
    """Return a regular expression in Lark's notation: between slashes, on one line."""
    within = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(r"\\.|/|\n", lambda match: within.get(match[0], match[0]), pattern)
    return f"/{escaped}/" if escaped else '""'
