"""Writes docs/reference/: commands, configuration, environment, errors and metrics, as the code has them.

python scripts/reference.py --write    # rewrite the pages
python scripts/reference.py --check    # fail unless they are up to date
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from prometheus_client.metrics import MetricWrapperBase

from lockstep.cli import app
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.settings import PREFIX, Settings
from lockstep.tokens import errors
from lockstep.train.config import Range, TrainConfig
from lockstep.worker.metrics import WorkerMetrics

PAGES = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- written by scripts/reference.py --write: change the code, not this page -->"
SETTING = re.compile(r"^\s*(LOCKSTEP_\w+)\s\s+(.*)$")
ERROR = re.compile(r"^[│├└─ ]*(\w+)\s+(?:(\d{3})\s+)?(.*)$")


def cell(text: object) -> str:
    """Text that stays inside one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *(tuple(cell(each) for each in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(value: object) -> str:
    return f"`{value}`" if str(value) else ""


def first_sentences(doc: str | None) -> str:
    """A docstring as one paragraph per paragraph."""
    parts = inspect.cleandoc(doc or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


# Commands


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command of a group, with the words that call it."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def default_of(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value in (None, (), [], ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    return code(value)


def choices_of(parameter: Any) -> str:
    """The help of an option, with the values it takes where they are few."""
    kind = parameter.type_descriptor.annotation
    kinds = (kind, *get_args(kind))
    named = next((each for each in kinds if get_origin(each) is Literal), None)
    if named is None:
        return parameter.help or ""
    values = ", ".join(code(each) for each in get_args(named))
    return f"{parameter.help or ''} One of {values}."


def cli_page() -> str:
    root = typer.main.get_command(app)
    parts = ["# Commands", NOTE, "`lockstep COMMAND --help` says the same in a terminal."]
    for name, command in commands(root, "lockstep"):
        shown = [each for each in command.params if not getattr(each, "hidden", False)]
        arguments = [each for each in shown if not each.opts[0].startswith("-")]
        usage = " ".join([name, *(f"[{each.name.upper()}]" for each in arguments)])
        parts += [f"## `{name}`", first_sentences(command.help), f"Usage: `{usage} [OPTIONS]`"]
        rows = []
        for each in sorted(shown, key=lambda each: each not in arguments):
            words = [*each.opts, *each.secondary_opts]
            label = code(each.name.upper()) if each in arguments else ", ".join(map(code, words))
            rows.append((label, default_of(each), choices_of(each)))
        if rows:
            parts.append(table(("option", "default", ""), rows))
    return "\n\n".join(parts)


# Training configuration


def type_name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f'"{each}"' for each in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(each) for each in arguments if each is not type(None))
    if origin is tuple:
        return (
            "list of tables" if is_dataclass(arguments[0]) else f"list of {type_name(arguments[0])}"
        )
    if origin is not None:
        return "table"
    return {"str": "text", "bool": "true or false", "int": "integer", "float": "number"}.get(
        kind.__name__, kind.__name__
    )


def toml(value: Any) -> str:
    """A default as TOML has it; nothing where leaving the field out is the only way to say it."""
    if value is None or value == {}:
        return ""
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, tuple):
        return code(list(value)).replace("'", '"')
    return code(f'"{value}"') if isinstance(value, str) else code(value)


def config_rows(kind: Any) -> Iterator[tuple[object, ...]]:
    plain, full = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if is_dataclass(plain[each.name]):
            continue
        helps = [note for note in get_args(full[each.name])[1:] if isinstance(note, str)]
        if not helps:
            raise SystemExit(f"{kind.__name__}.{each.name} has no help: Annotated[..., 'help']")
        made = each.default_factory
        default = made() if made is not MISSING else each.default
        ranges = [str(note) for note in get_args(full[each.name])[1:] if isinstance(note, Range)]
        kind_name = ", ".join([type_name(plain[each.name]), *ranges])
        yield code(each.name), kind_name, toml(default), helps[0]


def train_page() -> str:
    head = ("field", "type", "default", "")
    parts = [
        "# Configuration of `lockstep train`",
        NOTE,
        "A run is a TOML file. An unknown field, a wrong type or a value out of range is an error that names the field.",
        "## Top level",
        first_sentences(TrainConfig.__doc__),
        table(head, list(config_rows(TrainConfig))),
    ]
    for name, kind in get_type_hints(TrainConfig).items():
        if is_dataclass(kind):
            rows = list(config_rows(kind))
            parts += [f"## `[{name}]`", first_sentences(kind.__doc__), table(head, rows)]
    return "\n\n".join(parts)


# Environment


def environment_page() -> str:
    helps: dict[str, str] = {}
    for line in (Settings.__doc__ or "").splitlines():
        if match := SETTING.match(line):
            helps[match[1]] = match[2]
    names = [PREFIX + each.name.upper() for each in fields(Settings)]
    if sorted(names) != sorted(helps):
        raise SystemExit(f"the docstring of Settings has {sorted(helps)}: expected {sorted(names)}")
    rows: list[tuple[object, ...]] = []
    for each in fields(Settings):
        name = PREFIX + each.name.upper()
        rows.append((code(name), code(each.default) if each.default else "", helps[name]))
    rest = first_sentences(Settings.__doc__).split("\n\n")[-1]
    parts = [
        "# Environment variables",
        NOTE,
        "Options of a command beat them.",
        table(("variable", "default", ""), rows),
        rest,
    ]
    return "\n\n".join(parts)


# Errors


def error_classes(kind: type[errors.LockstepError]) -> Iterator[type[errors.LockstepError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from error_classes(each)


def errors_page() -> str:
    told: dict[str, str] = {"LockstepError": "anything that Lockstep raises on purpose"}
    for line in (errors.__doc__ or "").splitlines():
        if match := ERROR.match(line):
            told.setdefault(match[1], match[3])
    rows: list[tuple[object, ...]] = []
    for kind in sorted(error_classes(errors.LockstepError), key=lambda kind: kind.status):
        if kind.__module__ != errors.__name__ or kind.__name__ not in told:
            raise SystemExit(f"{kind.__name__} is not in the tree that opens {errors.__name__}")
        above = next(each.__name__ for each in kind.__mro__[1:] if issubclass(each, Exception))
        rows.append(
            (code(kind.code), kind.status, code(kind.__name__), code(above), told[kind.__name__])
        )
    parts = [
        "# Errors",
        NOTE,
        "An error leaves a server with the status below and the body "
        '`{"error": {"message", "type", "param", "code", "reason", "request_id"}}`: `code` is the status, `reason` the code of this table. '
        "A Lockstep client raises it as the class of that code, from `lockstep.errors`. "
        "Catch `LockstepError` for all of them, or a class for it and those under it.",
        table(("code", "status", "class", "a kind of", "meaning"), rows),
    ]
    return "\n\n".join(parts)


# Metrics


class _Stats(defaultdict[str, Any]):
    """Numbers of an engine that does not run."""

    def __init__(self) -> None:
        super().__init__(int)


def metric_rows(registry: Any) -> Iterator[tuple[object, ...]]:
    """Name, type, labels and help of what a registry collects, also of what has no value yet."""
    for collector in registry._collector_to_names:
        for metric in collector.collect():
            labels = getattr(metric, "_labelnames", None)
            if isinstance(collector, MetricWrapperBase):
                labels = collector._labelnames
            name = metric.name + ("_total" if metric.type == "counter" else "")
            yield code(name), metric.type, ", ".join(map(code, labels or ())), metric.documentation


async def metrics_page() -> str:
    """In an event loop, as a gateway counts its tasks."""

    class Nothing:
        workers: tuple[()] = ()

    idle = types.SimpleNamespace(pool=Nothing(), sessions=Sessions())
    engine = types.SimpleNamespace(stats=_Stats)
    head = ("metric", "type", "labels", "")
    gateway: Any = GatewayMetrics(idle)  # type: ignore[arg-type]
    worker: Any = WorkerMetrics(engine, "tiny")  # type: ignore[arg-type]
    parts = [
        "# Metrics",
        NOTE,
        "In Prometheus' text format, at `GET /metrics`.",
        "## A gateway",
        "On its data port.",
        table(head, sorted(metric_rows(gateway.registry), key=str)),
        "## A worker",
        "On its data port.",
        table(head, sorted(metric_rows(worker.registry), key=str)),
    ]
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Every page by the name of its file."""
    made = {
        "cli.md": cli_page(),
        "train.md": train_page(),
        "environment.md": environment_page(),
        "errors.md": errors_page(),
        "metrics.md": asyncio.run(metrics_page()),
    }
    return {name: text + "\n" for name, text in made.items()}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 where `--check` finds another page."""
    if arguments not in (["--write"], ["--check"]):
        print("expected --write or --check")
        return 2
    for name, text in pages().items():
        path = PAGES / name
        if arguments == ["--write"]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            print(
                f"docs/reference/{name} is not what the code says: run scripts/reference.py --write"
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
