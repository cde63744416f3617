"""The script of a scripted worker: rules in a file, each with a condition and a reply."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from lockstep.tokens.errors import (
    BadRequest,
    Busy,
    EngineFailure,
    LockstepError,
    NotFound,
    TooLarge,
    Unauthorized,
    Unavailable,
)

ERRORS: dict[int, type[LockstepError]] = {
    400: BadRequest,
    401: Unauthorized,
    404: NotFound,
    413: TooLarge,
    429: Busy,
    500: EngineFailure,
    503: Unavailable,
}
_PLACE = re.compile(r"\{\{(\w+)\}\}")


class When(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Condition of a rule. All given fields must match.

    `last` is a regular expression searched in the last message. `prompt` and `without` are texts
    that the whole prompt must and must not contain. `turn` is the number of assistant turns in the
    prompt.
    """

    last: str | None = None
    prompt: str | list[str] = []
    without: str | list[str] = []
    turn: int | None = None


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call in a reply. Arguments given as text are emitted unchanged, valid JSON or not."""

    name: str
    arguments: dict[str, Any] | str = {}


class ScriptedError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error instead of a completion, or after its first tokens."""

    status: int = 500
    message: str = "the script wants this request to fail"
    after_tokens: int = 0
    retry_after: float | None = None

    def error(self) -> LockstepError:
        return ERRORS[self.status](self.message, retry_after=self.retry_after)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule. The first that applies is used, at most `times` times.

    `say`, `think` and `calls` are written in the chat format of the model, `raw` is written as it
    is. `finish="length"` omits the token that ends the turn. `delay` is the time in seconds before
    the first token, `token_delay` that between two tokens.
    """

    when: When = When()
    say: str = ""
    think: str = ""
    calls: list[ScriptedCall] = []
    raw: str | None = None
    finish: Literal["stop", "length"] = "stop"
    error: ScriptedError | None = None
    times: int | None = None
    delay: float = 0.0
    token_delay: float = 0.0


class PromptView(msgspec.Struct, frozen=True):
    """The parts of a prompt that rules match: text, last message and number of turns."""

    text: str
    last: str
    turn: int


class Script:
    """The rules of a file, and how often each was used."""

    def __init__(self, rules: list[Rule], name: str = "script") -> None:
        self.rules = rules
        self.name = name
        self._uses = [0] * len(rules)

    @classmethod
    def read(cls, path: Path) -> Script:
        """Return the script in a file of JSON lines, or of one JSON list.

        Raises BadRequest that names the line (or the index in the list) and the field.
        """
        try:
            text = path.read_text()
        except OSError as error:
            raise BadRequest(f"the script {path} cannot be read: {error}", param="script") from None
        if text.lstrip().startswith("["):
            listed = _decode_list(path, "the file", text)
            parts = [(f"rule {at}", json.dumps(raw)) for at, raw in enumerate(listed)]
        else:
            lines = enumerate(text.splitlines(), 1)
            parts = [(f"line {at}", line) for at, line in lines if line.strip()]
        if not parts:
            raise BadRequest(f"the script {path} holds no rule", param="script")
        return cls([_rule(path, where, raw) for where, raw in parts], path.name)

    def find(self, view: PromptView) -> tuple[int, Rule]:
        """Return the first rule that applies, with the groups of its regular expression filled in.

        Raises BadRequest when there is none.
        """
        for at, rule in enumerate(self.rules):
            if rule.times is not None and self._uses[at] >= rule.times:
                continue
            groups = _match(rule.when, view)
            if groups is not None:
                return at, _fill_rule(rule, groups)
        raise BadRequest(
            f"no rule of {self.name} applies: the prompt has {view.turn} assistant turns, and "
            f"its last message ends with {view.last[-200:]!r}"
        )

    def take(self, at: int) -> None:
        """Count one use of a rule."""
        self._uses[at] += 1


def _match(when: When, view: PromptView) -> dict[str, str] | None:
    """Return the values of a rule's placeholders, or None if it does not apply."""
    if when.turn not in (None, view.turn):
        return None
    if any(text not in view.text for text in _as_list(when.prompt)):
        return None
    if any(text in view.text for text in _as_list(when.without)):
        return None
    if when.last is None:
        return {}
    match = re.search(when.last, view.last, re.DOTALL)
    if match is None:
        return None
    groups = {str(at): value or "" for at, value in enumerate((match[0], *match.groups()))}
    return groups | {name: value or "" for name, value in match.groupdict().items()}


def _fill_rule(rule: Rule, groups: dict[str, str]) -> Rule:
    if not groups:
        return rule
    fields = {name: getattr(rule, name) for name in ("say", "think", "raw")}
    calls = msgspec.to_builtins(rule.calls)
    return msgspec.structs.replace(
        rule,
        **_fill(fields, groups),
        calls=msgspec.convert(_fill(calls, groups), list[ScriptedCall]),
    )


def _fill(value: Any, groups: dict[str, str]) -> Any:
    """Return the value with every {{1}} or {{name}} replaced by the text of that group."""
    if isinstance(value, str):
        return _PLACE.sub(lambda place: groups.get(place[1], place[0]), value)
    if isinstance(value, list):
        return [_fill(item, groups) for item in value]
    if isinstance(value, dict):
        return {key: _fill(item, groups) for key, item in value.items()}
    return value


def _rule(path: Path, where: str, raw: str) -> Rule:
    try:
        rule = msgspec.json.decode(raw, type=Rule)
        re.compile(rule.when.last or "")
    except (msgspec.DecodeError, re.error) as error:
        raise BadRequest(f"{path}, {where}: {error}", param="script") from None
    if rule.error is not None and rule.error.status not in ERRORS:
        statuses = ", ".join(map(str, ERRORS))
        raise BadRequest(
            f"{path}, {where}: error.status is {rule.error.status}, expected one of {statuses}",
            param="script",
        )
    return rule


def _decode_list(path: Path, where: str, text: str) -> list[Any]:
    try:
        return msgspec.json.decode(text, type=list[Any])
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path}, {where}: {error}", param="script") from None


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
