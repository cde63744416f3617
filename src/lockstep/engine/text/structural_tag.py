"""Structural tags, which vLLM and SGLang take for tool calls, as a grammar of `llguidance`.

Read are the formats json_schema, const_string, regex, any_text, sequence, or, tag,
tags_with_separator and triggered_tags of a `{"type": "structural_tag", "format": ...}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.tokens.errors import BadRequest

TEXT = r"/(.|\n)*/"
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,20}"}
"""A model that likes spaces would otherwise write them up to its last token."""


class TagGrammar:
    """Writes the rules of one structural tag. `added` are the added tokens, by their text.

    Where a text has one of them, exactly that token must come: its letters would read the same, but
    a parser that looks for the token would not find it.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        names = sorted(added, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def lark(self, text: str) -> str:
        """The grammar in Lark's notation. Raises BadRequest for what is no structural tag."""
        try:
            tag = json.loads(text)
            start = self._rule(tag["format"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequest(
                f"structural_tag cannot be read ({error!r}): expected "
                '{"type": "structural_tag", "format": {...}}',
                param="structured_outputs.structural_tag",
            ) from None
        return "\n".join([f"start: {start}", *self._rules])

    def _rule(self, form: dict[str, Any]) -> str:
        """The expression of a format, with rules of its own where it needs some."""
        match form["type"]:
            case "const_string":
                return self._literal(form["value"])
            case "json_schema":
                schema = form["json_schema"]
                if isinstance(schema, dict):
                    schema = {"x-guidance": JSON_OPTIONS, **schema}
                return f"%json {json.dumps(schema)}"
            case "regex":
                return self._named(_regex(form["pattern"]), terminal=True)
            case "any_text":
                return self._named(TEXT, terminal=True)
            case "sequence":
                return self._named(" ".join(self._rule(each) for each in form["elements"]))
            case "or":
                return self._named(" | ".join(self._rule(each) for each in form["elements"]))
            case "tag":
                return self._tag(form)
            case "tags_with_separator":
                return self._separated(form)
            case "triggered_tags":
                return self._triggered(form)
        raise BadRequest(
            f"structural_tag has a format of type {form['type']!r}, which is not known here",
            param="structured_outputs.structural_tag",
        )

    def _tag(self, form: dict[str, Any]) -> str:
        if form["content"]["type"] == "any_text" and form["end"]:
            return self._named(f"{self._literal(form['begin'])} {self._until(form['end'])}")
        parts = (self._literal(form["begin"]), self._rule(form["content"]))
        return self._named(" ".join((*parts, self._literal(form["end"]))))

    def _separated(self, form: dict[str, Any]) -> str:
        any_tag = self._named(" | ".join(self._tag(each) for each in form["tags"]))
        if form.get("stop_after_first"):
            return any_tag if form.get("at_least_one") else f"({any_tag})?"
        rest = f"({self._literal(form['separator'])} {any_tag})*"
        several = self._named(f"{any_tag} {rest}")
        return several if form.get("at_least_one") else f"({several})?"

    def _triggered(self, form: dict[str, Any]) -> str:
        """Free text up to a trigger, where one of the tags must follow."""
        called = []
        for trigger in form["triggers"]:
            rests = [
                {**each, "begin": each["begin"][len(trigger) :]}
                for each in form["tags"]
                if each["begin"].startswith(trigger)
            ]
            tags = self._named(" | ".join(self._tag(each) for each in rests))
            called.append(f"{self._until(trigger)} {tags}")
        calls = self._named(" | ".join(called))
        free = self._named(TEXT, terminal=True)
        if form.get("stop_after_first"):
            return self._named(calls if form.get("at_least_one") else f"{calls} | {free}")
        repeated = f"{calls}+" if form.get("at_least_one") else f"{calls}*"
        return self._named(f"{repeated} {free}")

    def _until(self, trigger: str) -> str:
        """Free text that ends with the first occurrence of a trigger."""
        if self._names is not None and self._names.match(trigger):
            return f"{self._named(TEXT, terminal=True)} {self._literal(trigger)}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {TEXT} {json.dumps(trigger)}")
        return name

    def _literal(self, text: str) -> str:
        """A text, with added tokens as themselves."""
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

    def _named(self, body: str, *, terminal: bool = False) -> str:
        # Lark tells what the lexer reads from rules by capital letters.
        name = f"{'TEXT' if terminal else 'rule'}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _regex(pattern: str) -> str:
    """A regular expression in Lark's notation: between slashes, on one line."""
    within = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(r"\\.|/|\n", lambda match: within.get(match[0], match[0]), pattern)
    return f"/{escaped}/" if escaped else '""'
